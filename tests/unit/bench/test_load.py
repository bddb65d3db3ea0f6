"""Many requests at once: what clients see, and replays by a table of costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from doubles import FakeModel
from forerun import LLM, SamplingParams
from forerun.bench.echo import EchoModel
from forerun.bench.load import arrival, batches, loop, many, prefix, replay
from forerun.bench.load.asks import Ask, in_turn, mixed, slices
from forerun.bench.load.priced import PricedTarget
from forerun.bench.load.replay_costs import DrafterCosts, Surface, TargetCosts, drafter_costs, target_costs
from forerun.bench.load.serving import Clients, Stream, Window, closed_loop
from forerun.bench.priced_run import VirtualClock
from forerun.bench.report import Table
from forerun.bench.slots_reference import SlotsReference
from forerun.config import EngineConfig
from forerun.drafters import PromptLookup
from forerun.engine.engine import Engine
from forerun.engine.prompt_share import MIN_ROWS
from forerun.errors import ConfigError
from forerun.models import Rows
from forerun.plan.step_times import CostCurve

PARAMS = SamplingParams(temperature=0, ignore_eos=True)


def llm(drafter: Any = None, max_batch: int = 8, seed: int = 0) -> LLM:
    model: Any = FakeModel(order=1, seed=seed)  # soon repeats itself
    return LLM(model, drafter=drafter, max_batch=max_batch)


def prompts(count: int, length: int = 5) -> list[list[int]]:
    """No two of them begin with the same token."""
    return [[(i + j * (i + 1)) % 11 for j in range(length)] for i in range(count)]


def test_lengths_are_mixed_and_prompts_differ() -> None:
    asks = mixed([*prompts(7, 8), prompts(1, 8)[0]], 8, 20)  # the last is the first again, which is cut shorter
    assert len(asks) == 7
    assert {len(ask.token_ids) for ask in asks} == {8, 2, 4, 1}
    assert {ask.max_tokens for ask in asks} == {10, 20, 5, 15}
    assert in_turn(asks, 6, 2) == [asks[6], asks[0]]
    assert slices([1, 2, 3, 4], 3, 2) == [[1, 2, 3], [3, 4, 1]]
    with pytest.raises(ConfigError, match="too few for 5"):
        slices([1, 2, 3, 4], 3, 5)


def test_times_of_a_stream() -> None:
    stream = Stream(1.0, [(3.0, 1), (5.0, 4), (6.0, 1)])
    assert stream.first_token == 2
    assert stream.gaps == [0.5] * 4 + [1.0]
    assert stream.waits == [2.0, 1.0]
    assert Stream(1.0).first_token is None


def test_as_many_requests_are_open_until_the_window_closes() -> None:
    engine = llm().engine
    clock = VirtualClock()
    clients = Clients(engine, PARAMS, "t", clock)
    open_requests = []
    advance = engine.advance

    def counted() -> None:
        clock.now += 1
        open_requests.append(len(clients.live))
        advance()

    engine.advance = counted  # type: ignore[method-assign]
    asks = [Ask(prompt, 4 + i) for i, prompt in enumerate(prompts(6))]
    window = closed_loop(clients, asks, 3)
    assert set(open_requests[: int(window.seconds)]) == {3}
    assert len(window.streams) == 6
    assert window.num_tokens == sum(count for stream in window.streams for _, count in stream.arrivals)
    assert 4 <= sum(stream.done for stream in window.streams) < 6  # the last ones are aborted
    assert not engine.has_work and not clients.live


def test_an_error_of_a_request_reaches_the_caller() -> None:
    chosen = llm()
    clients = Clients(chosen.engine, PARAMS)
    clients.send(Ask([1, 2], 3))

    def broken(_: object) -> None:
        raise RuntimeError("no such row")

    chosen.target.before_forward = broken  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="no such row"):
        clients.finish()


def test_every_measurement_has_its_row() -> None:
    plain = llm()
    arms = {loop.PLAIN: plain, "auto, prompt-lookup": LLM(plain.target, drafter=PromptLookup())}
    asks = mixed(prompts(11, 6), 6, 8)
    rows = loop.measure(arms, asks, PARAMS, [1, 3], pairs=2)
    assert [(row.outstanding, row.method) for row in rows] == [(n, arm) for n in (1, 3) for arm in arms]
    assert all(row.over_plain.median == 1 for row in rows if row.method == loop.PLAIN)
    assert [row.over_generate is None for row in rows] == [True, False, True, True]
    found = batches.measure(plain, prompts(4), [1, 4], max_tokens=6, rounds=1)
    assert [row.batch for row in found] == [1, 4]
    assert all(0 < row.outside.median < 1 and row.step > 0 for row in found)
    (repeated,) = prefix.measure(plain, prompts(2, 30), prompts(4, 3))
    assert repeated.prefix == 30 and repeated.over_first.median > 0
    (late,) = arrival.measure(llm(), prompts(2), prompts(2, 40), max_tokens=12)
    assert (late.streams, late.prompt) == (2, 40)
    assert late.longest.median >= late.p99_over_median.median
    for module, measured in ((loop, rows), (batches, found), (prefix, [repeated]), (arrival, [late])):
        table = Table.of("", module.COLUMNS, measured)
        assert all(len(line) == len(table.header) for line in table.rows)


def test_the_loop_of_slots_computes_the_model() -> None:
    plain = LLM("bundled", None, max_batch=3)
    reference = SlotsReference("bundled", slots=3, length=12)
    some = [[5 + i + 7 * j for j in range(6)] for i in range(3)]
    check = many.check(reference, plain.target, some)
    assert check.difference < 0.05 and check.same_token == 1
    answers = reference.generate(some, 4)
    assert [len(answer) for answer in answers] == [4] * 3
    cache = plain.target.new_cache()  # later positions too: the answer's last token, by the model
    with torch.inference_mode():
        logits = plain.target.forward([Rows(cache, [*some[1], *answers[1][:3]], num_logits=1)]).logits[-1]
    assert logits[answers[1][3]] > logits.max() - 0.1 * logits.std()
    rows = many.measure({"plain": plain}, reference, some, max_tokens=3, rounds=1)
    assert rows[0].method == f"{many.REFERENCE}, threads: 1"
    assert rows[-1].method == "plain" and rows[-1].speed.median > 0


def flat(seconds: float, per_count: float = 0.0) -> Surface:
    return Surface([1, 8], [CostCurve([0, 10], [seconds, seconds + 10 * per_count])] * 2)


def costs(row: float, draft: float) -> tuple[TargetCosts, DrafterCosts]:
    """A forward costs 1 and `row` for each row; drafting costs `draft`."""
    return TargetCosts(flat(1, row), 5, 0.0), DrafterCosts(flat(draft), flat(0), flat(0))


def test_costs_between_and_beyond_their_points() -> None:
    surface = Surface([2, 4], [CostCurve([2, 4], [1.0, 2.0]), CostCurve([4, 8], [3.0, 4.0])])
    assert [surface(2, 2), surface(4, 8), surface(3, 4)] == [1.0, 4.0, 2.5]
    assert surface(2, 6) == 3.0
    target = TargetCosts(surface, context=10, position=0.1)
    assert target(2, 2, 30) == pytest.approx(2.0)
    assert target(2, 2, 0) == pytest.approx(0.25)  # no forward is free


def test_costs_are_measured_and_read_again() -> None:
    plain = llm(max_batch=4)
    target = target_costs(plain.target, [1, 4], context=6, rounds=1)
    assert target.rows.sequences == [1, 4]
    assert target(2, 6, 12) > 0
    measured = drafter_costs(plain, PromptLookup, [1, 4], prompts(4), max_tokens=12)
    assert measured.idle(4, 0) > 0 and measured.draft(4, 2) > 0 and measured.rest(1, 0) > 0
    from forerun.cli.output import plain as as_plain

    assert TargetCosts.read(as_plain(target))(2, 6, 12) == target(2, 6, 12)
    assert DrafterCosts.read(as_plain(measured)).draft(3, 2) == measured.draft(3, 2)


@pytest.mark.parametrize("outstanding", [1, 4])
def test_a_replay_costs_what_its_steps_cost(outstanding: int) -> None:
    plain = llm()
    target, drafter = costs(row=0.0, draft=0.0)
    priced = replay.Priced(plain, PromptLookup, target, drafter)
    asks = mixed(prompts(11, 6), 6, 40)
    (row,) = replay.measure(priced, "prompt-lookup", asks, PARAMS, [outstanding], [4])
    again = replay.measure(priced, "prompt-lookup", asks, PARAMS, [outstanding], [4])
    assert again == [row]  # no clock
    assert 0.75 * outstanding < row.plain <= outstanding  # a step costs 1; those with a prompt's first chunks give less
    assert row.best == "K=4" and row.best_over_plain > 1.3  # drafts are free
    assert row.auto_over_plain > 1.2


def test_drafts_that_cost_more_than_they_give_are_left_out() -> None:
    target, drafter = costs(row=1.0, draft=9.0)
    priced = replay.Priced(llm(), PromptLookup, target, drafter)
    (row,) = replay.measure(priced, "prompt-lookup", mixed(prompts(11, 6), 6, 60), PARAMS, [4], [4])
    assert row.best == "plain"
    assert row.auto_over_plain > 0.85  # of which learning costs most: there are no two hundred steps
    assert row.idle > 0.8


def test_an_echo_tells_sequences_apart_by_their_prompts() -> None:
    echo = EchoModel(FakeModel(), [[1, 2, 3, 4, 5], [1, 2, 6, 7]])
    first, second = echo.new_cache(), echo.new_cache()
    echo.forward([Rows(first, [1, 2], num_logits=0), Rows(second, [1], num_logits=0)])
    first.commit([0, 1])
    second.commit([0])
    logits = echo.forward([Rows(first, [3], num_logits=1), Rows(second, [2, 6], num_logits=1)]).logits
    assert logits.argmax(-1).tolist() == [4, 7]
    first.commit([0])
    assert echo.forward([Rows(first, [4, 9])]).logits.argmax(-1).tolist() == [5, 0]


def test_an_echo_tells_the_text_where_a_draft_follows_the_last_token_of_the_prompt() -> None:
    echo = EchoModel(FakeModel(), [[1, 2, 3, 4, 5], [1, 2, 6, 7]])
    cache = echo.new_cache()
    echo.forward([Rows(cache, [1, 2], num_logits=0)])
    cache.commit([0, 1])
    assert echo.forward([Rows(cache, [3, 4, 9])]).logits.argmax(-1).tolist() == [4, 5, 0]


def test_prompts_are_shared_out_by_the_time_of_the_replay() -> None:
    """A row of a prompt takes a fifth of a plain step here, so few of them may lengthen one."""
    plain = llm()
    clock = VirtualClock()
    target = PricedTarget(plain.target, costs(row=0.25, draft=0.0)[0], clock)
    engine = Engine(target, config=EngineConfig(max_batch=2), clock=clock)
    clients = Clients(engine, PARAMS, "t", clock)
    clients.send(Ask(prompts(1)[0], 60))
    rows = []
    for number in range(30):
        if number in (10, 20):
            clients.send(Ask([number // 10] * 100, 2))
        rows.append(clients.step().num_prompt_rows)
    assert rows[10] == 100  # nothing was known of prompts before the first
    assert rows[20:26] == [MIN_ROWS] * 6


def test_prompts_whose_answers_are_under_way_at_the_end_of_a_replay_do_not_count() -> None:
    """A window of ten plain steps; with it a prompt of 4 tokens was computed once, and three times the other time."""
    speeds = []
    for count in (1, 3):
        clock = VirtualClock()
        target = PricedTarget(FakeModel(), costs(row=0.5, draft=0.0)[0], clock)
        answering = target.new_cache()
        for number in range(10):
            batch = [Rows(answering, [1], num_logits=1)]
            if number < count:
                batch.append(Rows(target.new_cache(), [2, 3, 4], num_logits=0))
            target.forward(batch)
            for rows in batch:
                rows.cache.commit(range(len(rows.token_ids)))
        assert target.prompt_rows == 3 * count
        window = Window(clock.now, 10, [])
        speeds.append(replay.steady_speed(window, target, [Ask([2, 3, 4, 5], 10)]))
    # a step costs 1 and 0.5 for each row
    assert speeds == [pytest.approx(10 / (10 * 1.5 + 3 * 0.5))] * 2
