"""Places, memory and turns: who waits, who loses a place, and that nobody's text shows it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from doubles import FakeModel, Scripted, adversaries
from forerun.config import EngineConfig, SamplingParams
from forerun.engine import Engine, StepOutput
from forerun.engine.scheduler import MAX_ROWS
from forerun.errors import PromptError, QueueFullError
from forerun.models import Rows
from forerun.speculation import AutomaticPolicy, FixedPolicy, SpeculationPolicy
from forerun.types import Sequence
from fuzzing import examples
from pool_integrity import check_integrity
from pooled import PAGE, PooledModel

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def finish(engine: Engine, limit: int = 2000) -> dict[tuple[int, int], StepOutput]:
    """Step until idle, and look after every step whether the pages add up."""
    last: dict[tuple[int, int], StepOutput] = {}
    for _ in range(limit):
        if not engine.has_work:
            return last
        for output in engine.step():
            last[output.request_id, output.chunk.index] = output
        check(engine)
    raise AssertionError("the engine does not come to an end")


def check(engine: Engine) -> None:
    pool = engine.target.pool
    if pool is not None:
        check_integrity(pool, [cache for cache in engine.target.caches if not cache.freed])
        assert pool.num_pages is None or pool.num_taken <= pool.num_pages


def engine_of(num_pages: int | None, **options: object) -> tuple[PooledModel, Engine]:
    fake = PooledModel(num_pages)
    return fake, Engine(fake, None, config=EngineConfig(**options))


def test_a_prompt_that_fits_only_when_others_leave_waits() -> None:
    fake, engine = engine_of(10)
    first = engine.add([1] * 20, GREEDY)  # 8 pages in the end
    second = engine.add([2] * 21, GREEDY)
    orders = []
    while engine.has_work:
        orders += [output.request_id for output in engine.step() if output.choice is not None]
        assert len(engine.scheduler.running) <= 1
        check(engine)
    assert orders == [first, second]
    assert fake.pool.num_evicted > 0


def test_a_request_ends_where_the_pool_does() -> None:
    fake, engine = engine_of(6)
    engine.add([1] * 20, GREEDY)
    (last,) = finish(engine).values()
    assert last.choice is not None and last.choice.finish_reason == "length"
    assert last.choice.token_ids == fake.greedy([1] * 20, 4)
    with pytest.raises(PromptError, match=r"24 tokens, .* holds 24 \(memory; the model's own 4,096\)"):
        engine.add([1] * 24, GREEDY)
    assert not engine.has_work


def test_who_came_last_loses_its_place_and_writes_the_same_text() -> None:
    """Three sequences that fit in the beginning, and not in the end."""
    fake, engine = engine_of(12, prefix_reuse="off")
    prompts = [[i, i, 1, 2, 3, 4] for i in range(3)]
    params = replace(GREEDY, max_tokens=26)
    ids = [engine.add(prompt, params) for prompt in prompts]
    last = finish(engine)
    stats = [last[i, 0].choice.stats for i in ids]
    assert stats[0].num_preemptions == 0
    assert sum(each.num_preemptions for each in stats) > 0
    for i, prompt in zip(ids, prompts):
        assert last[i, 0].choice.token_ids == fake.greedy(prompt, 26)


def test_priority_comes_first_and_takes_places() -> None:
    _, engine = engine_of(100, max_batch=1)
    low = engine.add([1, 2], replace(GREEDY, priority=-1))
    engine.step()
    high = engine.add([3, 4], replace(GREEDY, priority=5))
    middle = engine.add([5, 6], GREEDY)
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step() if output.choice is not None]
        check(engine)
    assert order == [high, middle, low]


def test_who_lost_a_place_gets_it_back_in_the_order_of_coming() -> None:
    _, engine = engine_of(1000, max_batch=2)
    low = [engine.add([1, i], replace(GREEDY, priority=-1)) for i in range(3)]
    engine.step()
    for i in range(2):
        engine.add([3, i], GREEDY)
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step() if output.choice is not None]
    assert order[2:] == low


def test_prompts_of_one_step_share_its_rows() -> None:
    _, engine = engine_of(1000)
    for i in range(3):
        engine.add([i] * 250, replace(GREEDY, max_tokens=1))
    engine.step()
    assert engine.last_step.num_rows == MAX_ROWS < 3 * 250
    finish(engine)


def test_tenants_take_turns() -> None:
    _, engine = engine_of(1000, max_batch=1)
    busy = [engine.add([1, 2, i], replace(GREEDY, tenant="busy")) for i in range(5)]
    rare = engine.add([3, 4], replace(GREEDY, tenant="rare"))
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step() if output.choice is not None]
    assert order[:2] == [busy[0], rare] or order[:2] == [rare, busy[0]]
    assert [each for each in order if each in busy] == busy


def enqueue(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, flow: object = None, trusted: bool = False
) -> list[int]:
    requests = engine.requests(prompts, params, flow=flow)
    for request in requests:
        engine.enqueue(replace(request, scope=None) if trusted else request)
    return [request.id for request in requests]


def running(engine: Engine) -> list[int]:
    return [state.request.id for state in engine.scheduler.running]


LOUD = replace(GREEDY, tenant="loud", priority=100, max_tokens=100, ignore_eos=True)
QUIET = replace(GREEDY, tenant="quiet")


@pytest.mark.parametrize("trusted", [False, True], ids=["", "trusted"])
def test_a_priority_takes_nothing_from_another_tenant(trusted: bool) -> None:
    """Neither slots nor turns, unless all priorities are compared."""
    _, engine = engine_of(1000, max_batch=2)
    loud = enqueue(engine, [[1, 2, i] for i in range(6)], LOUD, trusted=trusted)
    engine.step()
    (quiet,) = enqueue(engine, [[3, 4]], QUIET, trusted=trusted)
    engine.step()
    assert running(engine) == (loud[:2] if trusted else [loud[0], quiet])
    enqueue(engine, [[1, 3], [1, 4]], LOUD, trusted=trusted)
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step() if output.choice is not None]
        check(engine)
    assert order[-1 if trusted else 0] == quiet and len(order) == 9


def test_a_tenant_s_priority_orders_its_own_requests() -> None:
    """Those that wait, and those that run, whatever runs of others."""
    _, engine = engine_of(1000, max_batch=3)
    others = enqueue(engine, [[1, i] for i in range(4)], replace(LOUD, max_tokens=300))
    low = enqueue(engine, [[2, i] for i in range(3)], replace(QUIET, max_tokens=40, ignore_eos=True, priority=-7))
    engine.step()
    assert running(engine) == [others[0], *low[:2]]
    (high,) = enqueue(engine, [[3, 4]], QUIET)
    engine.step()
    assert running(engine) == [others[0], low[0], high]
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step() if output.choice is not None]
    assert [each for each in order if each not in others] == [high, *low]


def test_a_tenant_s_prompts_take_turns_with_those_of_another_s_higher_priority() -> None:
    _, engine = engine_of(1000, max_batch=8)
    loud = enqueue(engine, [[1] * 500, [2] * 500, [3] * 500], LOUD)
    (low,) = enqueue(engine, [[4] * 100], replace(QUIET, priority=-3))
    (high,) = enqueue(engine, [[5] * 100], QUIET)
    begun: list[int] = []
    while len(begun) < 5:
        engine.step()
        states = engine.scheduler.running
        begun += [state.request.id for state in states if state.sequence.num_output and state.request.id not in begun]
    assert (begun[0], begun[-1]) == (high, loud[-1]) and low in begun
    finish(engine)


def test_short_memory_takes_from_the_latest_whatever_another_tenant_s_priority() -> None:
    _, engine = engine_of(10, prefix_reuse="off")
    (first,) = enqueue(engine, [[1, 2, 3, 4, 5, 6]], replace(QUIET, max_tokens=26, ignore_eos=True))
    (last,) = enqueue(engine, [[1, 2, 3, 4, 5, 6]], replace(LOUD, max_tokens=26))
    outputs = finish(engine)
    assert [outputs[each, 0].choice.stats.num_preemptions > 0 for each in (first, last)] == [False, True]


def test_a_flow_keeps_its_turn_when_a_request_of_high_priority_has_gone() -> None:
    """What it was given is remembered while anything of it waits."""
    _, engine = engine_of(1000, max_batch=1)
    enqueue(engine, [[2, i] for i in range(9)], replace(LOUD, max_tokens=12))
    engine.step()
    low = enqueue(engine, [[1, i] for i in range(2)], replace(QUIET, priority=-1))
    (urgent,) = enqueue(engine, [[3, 4]], QUIET)
    order: list[int] = []
    while engine.has_work:
        order += [output.request_id for output in engine.step() if output.choice is not None]
    assert [order.index(each) for each in (urgent, *low)] == [2, 4, 6]


def test_a_newcomer_passes_none_who_was_given_less() -> None:
    """It begins with what the flow has had that had most, not with what was served last."""
    _, engine = engine_of(1000, max_batch=1)
    long = enqueue(engine, [[1, i] for i in range(2)], replace(LOUD, priority=0, max_tokens=40))
    short = enqueue(engine, [[2, i] for i in range(4)], replace(QUIET, max_tokens=4, ignore_eos=True))
    order: list[int] = []
    new: list[int] = []
    while engine.has_work:
        order += [output.request_id for output in engine.step() if output.choice is not None]
        if short[0] in order and not new:
            new = enqueue(engine, [[3, 4]], replace(GREEDY, tenant="new"))
    assert order == [long[0], *short, long[1], *new]


def test_a_newcomer_gets_a_slot_of_a_flow_that_has_several() -> None:
    """A body of many prompts, and one of a single prompt; the texts are what they are alone."""
    fake, engine = engine_of(1000, max_batch=4)
    prompts = [[1, 2, i % 10] for i in range(12)]
    bulk = enqueue(engine, prompts, replace(GREEDY, max_tokens=100, ignore_eos=True), "bulk")
    for _ in range(3):
        engine.step()
    (new,) = enqueue(engine, [[3, 4]], GREEDY, "new")
    engine.step()
    assert new in [state.request.id for state in engine.scheduler.running]
    last = finish(engine)
    assert last[new, 0].choice.stats.num_preemptions == 0
    stats = [last[i, 0].choice.stats for i in bulk]
    assert [each.num_preemptions for each in stats] == [0, 0, 0, 1] + [0] * 8
    for i, prompt in zip(bulk, prompts):
        assert last[i, 0].choice.token_ids == fake.greedy(prompt, 100)


@pytest.mark.parametrize(("priority", "has_slot"), [(1, False), (0, True), (-1, True)])
def test_a_newcomer_gets_no_slot_of_a_flow_of_higher_priority(priority: int, has_slot: bool) -> None:
    _, engine = engine_of(1000, max_batch=2)
    bulk = enqueue(engine, [[1, 2], [1, 3]], replace(GREEDY, priority=priority), "bulk")
    engine.step()
    (new,) = enqueue(engine, [[3, 4]], GREEDY, "new")
    engine.step()
    assert running(engine) == ([bulk[0], new] if has_slot else bulk)
    last = finish(engine)
    assert [last[each, 0].choice.stats.num_preemptions for each in bulk] == [0, int(has_slot)]


def test_a_newcomer_gets_no_slot_of_a_flow_that_has_one() -> None:
    _, engine = engine_of(1000, max_batch=2)
    flows = [*enqueue(engine, [[1, 2]], GREEDY, "one"), *enqueue(engine, [[1, 3]], GREEDY, "two")]
    engine.step()
    enqueue(engine, [[3, 4]], GREEDY, "new")
    engine.step()
    assert running(engine) == flows
    finish(engine)


def test_choices_of_one_request_do_not_keep_a_newcomer_out() -> None:
    _, engine = engine_of(1000, max_batch=2)
    (many,) = enqueue(engine, [[1, 2]], SamplingParams(n=9, seed=1, max_tokens=20, ignore_eos=True), "many")
    for _ in range(3):
        engine.step()
    (new,) = enqueue(engine, [[3, 4]], GREEDY, "new")
    engine.step()
    assert {state.request.id for state in engine.scheduler.running} == {many, new}
    finish(engine)


def test_a_newcomer_s_prompt_is_computed_before_a_flow_s_second() -> None:
    _, engine = engine_of(1000, max_batch=8, prefill_chunk=256)
    enqueue(engine, [[1] * 500 for _ in range(4)], GREEDY, "bulk")
    (new,) = enqueue(engine, [[3] * 100], GREEDY, "new")
    engine.step()
    begun = [state.request.id for state in engine.scheduler.running if state.sequence.num_output]
    assert begun == [new]
    finish(engine)


def test_flows_of_one_sequence_do_not_starve_one_of_many() -> None:
    """And of flows that have gone nothing is kept."""
    _, engine = engine_of(1000, max_batch=1)
    bulk = enqueue(engine, [[1, i] for i in range(4)], GREEDY, "bulk")
    order: list[int] = []
    for i in range(400):
        if i % 4 == 0 and len(engine.scheduler) < 8:
            enqueue(engine, [[2, 3]], GREEDY, object())
        order += [output.request_id for output in engine.step() if output.choice is not None]
        assert len(engine.scheduler.waiting._given) <= 9
        if set(bulk) <= set(order):
            break
    assert set(bulk) <= set(order)
    finish(engine)


def test_a_full_queue_refuses() -> None:
    _, engine = engine_of(100, max_batch=2, max_queue=1)
    for _ in range(3):
        engine.add([1], GREEDY)
    for _ in range(2):  # before any of them runs, and while two do
        with pytest.raises(QueueFullError, match="max_queue 1 there is room for 0"):
            engine.add([1], GREEDY)
        engine.step()
    finish(engine)
    engine.add([1], GREEDY)
    finish(engine)


def test_a_prompt_of_several_choices_is_computed_once() -> None:
    fake, engine = engine_of(1000)
    prompt = [i % 11 for i in range(43)]
    engine.add(prompt, SamplingParams(n=4, seed=3, max_tokens=2))
    last = finish(engine)
    # each writes two tokens, the first of which is fed; each of three computes the prompt's last token again
    assert fake.num_rows == len(prompt) + 4 + 3
    other, alone = engine_of(1000, prefix_reuse="off")
    alone.add(prompt, SamplingParams(n=4, seed=3, max_tokens=2))
    theirs = finish(alone)
    assert [last[0, i].choice.token_ids for i in range(4)] == [theirs[0, i].choice.token_ids for i in range(4)]
    assert other.num_rows == 4 * (len(prompt) + 1)


@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_choices_go_on_when_the_first_is_lost(when: str) -> None:
    """The choice that computes the prompt fails: another takes its place."""
    fake = PooledModel(1000)
    drafter, starts = Scripted(lambda *_: []), []
    start = drafter.start

    def failing(sequence: Sequence) -> None:
        starts.append(sequence)
        if when == "before" and len(starts) == 1:
            raise RuntimeError("no")
        start(sequence)

    drafter.start = failing  # type: ignore[method-assign]
    engine = Engine(fake, drafter, config=EngineConfig(prefill_chunk=4, max_batch=2))
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0]
    engine.add(prompt, SamplingParams(n=3, seed=1, max_tokens=3))
    if when != "before":
        for _ in range(1 if when == "within" else 4):
            engine.step()
        state = engine.scheduler.running[0]
        state.error = RuntimeError("no")
        engine._ending.append(state)
    last = finish(engine)
    assert [output.error is not None for _, output in sorted(last.items())] == [True, False, False]
    alone = Engine(FakeModel())
    alone.add(prompt, SamplingParams(n=3, seed=1, max_tokens=3))
    theirs = finish(alone)
    assert [last[0, i].choice.token_ids for i in (1, 2)] == [theirs[0, i].choice.token_ids for i in (1, 2)]
    if when != "after":  # of one that has left, only whole pages are there
        assert last[0, 2].choice.stats.num_cached_tokens == len(prompt) - 1


def test_a_repeated_prompt_is_not_computed_again() -> None:
    fake, engine = engine_of(1000)
    prompt = [i % 11 for i in range(50)]

    def answer(params: SamplingParams) -> StepOutput:
        number = engine.add(prompt, params)
        return finish(engine)[number, 0]

    first = answer(GREEDY).choice
    before = fake.num_rows
    second = answer(GREEDY).choice
    assert second.token_ids == first.token_ids
    assert second.stats.num_cached_tokens == 48
    assert fake.num_rows - before == 2 + 11
    assert answer(replace(GREEDY, tenant="other")).choice.stats.num_cached_tokens == 0
    engine.add([*reversed(prompt)], replace(GREEDY, tenant="other"))
    finish(engine)
    number = engine.add([*reversed(prompt)], GREEDY)
    assert finish(engine)[number, 0].choice.stats.num_cached_tokens == 0
    whole = answer(replace(GREEDY, prompt_logprobs=0, max_tokens=1))
    assert len(whole.prompt_logprobs) == 50
    assert whole.choice.stats.num_cached_tokens == 0


def test_what_a_failed_request_has_computed_nobody_takes_over() -> None:
    """But for its prompt, from which a token came before."""
    fake, engine = engine_of(1000)
    prompt = [1, 2, 3, 4, 5, 6]

    def fail(batch: list[Rows]) -> None:
        if any(rows.cache.length > 3 * PAGE for rows in batch):
            raise OSError("out of paper")

    fake.before_forward = fail
    engine.add(prompt, GREEDY)
    assert isinstance(finish(engine)[0, 0].error, OSError)
    fake.before_forward = lambda _: None
    again = engine.add([*prompt, *fake.greedy(prompt, 8)], GREEDY)
    assert finish(engine)[again, 0].choice.stats.num_cached_tokens == PAGE


@pytest.mark.parametrize("num_steps", range(9))
def test_log_probabilities_of_a_prompt_come_once_whenever_its_place_is_lost(num_steps: int) -> None:
    """One for each token, as if the place had been kept: before, within and after the prompt."""
    params, prompt = replace(GREEDY, prompt_logprobs=1, logprobs=0, priority=-1), [i % 7 for i in range(20)]
    outputs = []
    for is_disturbed in (False, True):
        _, engine = engine_of(100, max_batch=1, prefill_chunk=4)
        number = engine.add(prompt, params)
        for _ in range(num_steps):
            engine.step()
        if is_disturbed:
            engine.add([3, 4, 5, 6, 7], GREEDY)
        outputs.append(finish(engine)[number, 0])
    kept, lost = outputs
    assert lost.choice.stats.num_preemptions == (num_steps > 0)
    assert len(lost.prompt_logprobs) == len(prompt)
    assert lost.prompt_logprobs == kept.prompt_logprobs
    assert (lost.choice.token_ids, lost.choice.logprobs) == (kept.choice.token_ids, kept.choice.logprobs)


def test_a_long_prompt_goes_in_parts_beside_answers() -> None:
    _, engine = engine_of(1000, prefill_chunk=8)
    engine.add([1, 2], replace(GREEDY, max_tokens=30, ignore_eos=True))
    engine.step()
    engine.add([3] * 60, GREEDY)
    counts = []
    for _ in range(8):
        engine.step()
        counts.append(engine.last_step.num_rows)
    assert counts == [9] * 7 + [5]


@pytest.mark.parametrize(
    ("policy", "reason", "rows"),
    [(FixedPolicy(3), "fixed", 12), (AutomaticPolicy(), "prompts", 9)],
    ids=["K=3", "auto"],
)
def test_auto_drafts_nothing_beside_prompts(policy: SpeculationPolicy, reason: str, rows: int) -> None:
    fake = FakeModel()
    drafter = adversaries({(1, 2): fake.greedy([1, 2], 60)}, fake.vocab_size)["right"]
    engine = Engine(fake, drafter, config=EngineConfig(prefill_chunk=8), policy=policy)
    engine.add([1, 2], replace(GREEDY, max_tokens=60, ignore_eos=True))
    engine.step()
    engine.add([3] * 40, GREEDY)
    for _ in range(4):
        engine.step()
        assert (engine.last_step.reason, engine.last_step.num_rows) == (reason, rows)
    finish(engine)


@pytest.mark.parametrize(
    ("kind", "k", "said"),
    [("none", 4, "off: no drafter"), ("right", 4, "on: fixed"), ("right", 0, "off: fixed")],
)
def test_a_result_says_why_speculation_was_on_or_off(kind: str, k: int, said: str) -> None:
    fake = FakeModel()
    drafter = None if kind == "none" else adversaries({(1, 2): fake.greedy([1, 2], 60)}, fake.vocab_size)[kind]
    engine = Engine(fake, drafter, config=EngineConfig(num_draft_tokens=k))
    engine.add([1, 2], GREEDY)
    stats = finish(engine)[0, 0].choice.stats
    assert stats.speculation == said
    assert engine.last_step.reason in ("", "fixed", "no room")
    engine.add([1, 2], replace(GREEDY, max_tokens=1))  # all of it comes of its prompt's step
    (stats,) = [output.choice.stats for output in finish(engine).values()]
    assert stats.speculation == ("off: prompts" if said == "on: fixed" else said)


def test_each_sequence_of_a_step_tells_its_own_reason() -> None:
    """Beside one that drafts: one that must not, and one that is given no page for it."""
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    fake = PooledModel(8)
    drafter = adversaries({tuple(prompt): fake.greedy(prompt, 60) for prompt in prompts}, fake.vocab_size)["right"]
    engine = Engine(fake, drafter, config=EngineConfig(num_draft_tokens=12))
    for prompt, k in zip(prompts, (None, 0, None)):
        engine.add(prompt, replace(GREEDY, max_tokens=20, num_draft_tokens=k))
    engine.step()
    engine.step()
    told = [state.stats.decisions for state in engine.scheduler.running]
    assert told == [{"on: fixed": 1}, {"off: request": 1}, {"off: no room": 1}]
    finish(engine)


def test_a_draft_without_pages_is_left_out() -> None:
    """Room for the text alone: drafts end where the pages do, and the sequence keeps its place."""
    fake = PooledModel(4)
    drafter = adversaries({(1, 2, 3): fake.greedy([1, 2, 3], 60)}, fake.vocab_size)["tree"]
    engine = Engine(fake, drafter, config=EngineConfig(num_draft_tokens=8))
    engine.add([1, 2, 3], replace(GREEDY, max_tokens=13))
    output = finish(engine)[0, 0]
    assert output.choice.token_ids == fake.greedy([1, 2, 3], 13)
    assert output.choice.stats.num_preemptions == 0
    assert output.choice.stats.decisions.get("off: no room", 0) > 0


Mix = tuple[int, list[tuple[list[int], SamplingParams, int, int | None]], int]
KINDS = ["none", "right", "wrong", "random", "tree"]


@st.composite
def mixes(draw: st.DrawFn) -> Mix:
    """A pool, requests with the step at which they come and perhaps are aborted, and a seed."""
    requests = []
    for _ in range(draw(st.integers(1, 7))):
        prompt = draw(st.sampled_from([[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0, 1]]))
        prompt = prompt * draw(st.integers(1, 2)) + draw(st.lists(st.integers(0, 10), max_size=3))
        params = SamplingParams(
            temperature=draw(st.sampled_from([0.0, 1.0])),
            seed=draw(st.integers(0, 9)),
            max_tokens=draw(st.integers(1, 14)),
            priority=draw(st.sampled_from([0, 0, 3])),
            tenant=draw(st.sampled_from([None, None, "a", "b"])),
            ignore_eos=True,
            logprobs=draw(st.sampled_from([None, 0])),
            prompt_logprobs=draw(st.sampled_from([None, None, 1])),
        )
        if params.temperature:
            params = replace(params, n=draw(st.sampled_from([1, 1, 3])))
        requests.append((prompt, params, draw(st.integers(0, 12)), draw(st.sampled_from([None, None, None, 2, 9]))))
    return draw(st.integers(9, 24)), requests, draw(st.integers(0, 2**20))


@examples(60)
@given(mix=mixes(), kind=st.sampled_from(KINDS), k=st.sampled_from([2, 6, "auto"]))
def test_any_mix_gives_each_request_what_it_gets_alone(mix: Mix, kind: str, k: int | str) -> None:
    num_pages, requests, seed = mix
    fake = PooledModel(num_pages)
    rng = random.Random(seed)
    drafter = None
    if kind != "none":
        references = {tuple(prompt): fake.greedy(prompt, 60) for prompt, *_ in requests}
        drafter = adversaries(references, fake.vocab_size)[kind]
    config = EngineConfig(num_draft_tokens=k, prefill_chunk=rng.choice([3, 256]), max_batch=rng.choice([2, 4]))
    engine = Engine(fake, drafter, config=config)
    ids: dict[int, int] = {}
    last: dict[tuple[int, int], StepOutput] = {}
    step = 0
    while engine.has_work or step < 13:
        for index, (prompt, params, comes, _) in enumerate(requests):
            if comes == step:
                ids[index] = engine.add(prompt, params)
        for index, (*_, comes, leaves) in enumerate(requests):
            if leaves is not None and comes + leaves == step:
                engine.abort(ids[index])
        for output in engine.step():
            last[output.request_id, output.chunk.index] = output
        check(engine)
        step += 1
        assert step < 3000
    assert len(engine.scheduler) == 0
    assert fake.pool.private == 0
    for index, (prompt, params, _, leaves) in enumerate(requests):
        alone = Engine(FakeModel(), None, config=EngineConfig(prefix_reuse="off"))
        alone.add(prompt, params)
        for (_, choice), expected in finish(alone).items():
            output = last[ids[index], choice]
            assert output.error is None
            ours, theirs = output.choice, expected.choice
            assert ours.stats.decisions.keys().isdisjoint(["off: gain", "off: fixed", "off: probe"])
            if ours.finish_reason == "abort":
                assert leaves is not None
                assert ours.token_ids == theirs.token_ids[: len(ours.token_ids)]
                continue
            assert ours.token_ids == theirs.token_ids
            assert ours.logprobs == theirs.logprobs
            assert output.prompt_logprobs == expected.prompt_logprobs


assert PAGE == 4  # what the numbers above were counted with
