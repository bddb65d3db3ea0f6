"""The step loop on a model computed by hashing: what it must give can be written down without it."""

from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
import torch

from doubles import FakeModel, PieceTokenizer, Scripted, adversaries
from forerun.config import EngineConfig, SamplingParams
from forerun.engine import Engine, StepOutput
from forerun.errors import ConfigError, DrafterError, PromptError, SamplingError
from forerun.speculation import DraftOutcome, FixedPolicy, StepCost
from forerun.types import Draft, Sequence

GREEDY = SamplingParams(temperature=0, max_tokens=14)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 1], [3, 3]]
BAD = ["right", "wrong", "random", "duplicated", "tree", "empty"]


def model(**options: object) -> FakeModel:
    return FakeModel(**options)


def drafter(fake: FakeModel, kind: str) -> Scripted:
    return adversaries({tuple(prompt): fake.greedy(prompt, 60) for prompt in PROMPTS}, fake.vocab_size)[kind]


def run(engine: Engine, limit: int = 500) -> dict[tuple[int, int], StepOutput]:
    """Step until idle; the last output of every choice, by request id and index."""
    last: dict[tuple[int, int], StepOutput] = {}
    for _ in range(limit):
        if not engine.has_work:
            return last
        for output in engine.step():
            last[output.request_id, output.chunk.index] = output
    raise AssertionError("the engine does not come to an end")


def tokens(output: StepOutput) -> list[int]:
    assert output.choice is not None
    return output.choice.token_ids


def assert_drafted(output: StepOutput, kind: str) -> None:
    """There were drafts to verify, and what the drafter is known to be right about was accepted."""
    assert output.choice is not None
    stats = output.choice.stats
    if kind != "random":
        assert (stats.num_draft_tokens > 0) == (kind != "empty")
    if kind in ("right", "duplicated", "tree"):
        assert stats.num_accepted_tokens > 0


def assert_clean(engine: Engine) -> None:
    """Nothing is left behind by whatever has left."""
    assert len(engine.scheduler) == 0
    assert all(cache.freed for cache in engine.target.caches)
    if isinstance(engine.drafter, Scripted):
        assert not engine.drafter.active


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("k", [1, 3, 5, 8])
@pytest.mark.parametrize("chunk", [2, 256])
def test_greedy_is_what_the_model_says(kind: str, k: int, chunk: int) -> None:
    fake = model()
    engine = Engine(
        fake, drafter(fake, kind), config=EngineConfig(num_draft_tokens=k, prefill_chunk=chunk, max_batch=3)
    )
    ids = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    last = run(engine)
    for request_id, prompt in zip(ids, PROMPTS):
        assert tokens(last[request_id, 0]) == fake.greedy(prompt, 14)
        assert last[request_id, 0].chunk.finish_reason == "length"
    for cache in fake.caches:
        assert any(cache.final == (prompt + fake.greedy(prompt, 14))[:-1] for prompt in PROMPTS)
    assert_clean(engine)


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("offset", range(10))
def test_stop_tokens_at_every_offset(kind: str, offset: int) -> None:
    fake = model(seed=5)
    expected = fake.greedy(PROMPTS[0], 14)
    stop = expected[offset]
    expected = expected[: expected.index(stop) + 1]
    for option in ({"stop_token_ids": (stop,)}, {}):
        fake.eos_token_ids = frozenset() if option else frozenset([stop])
        engine = Engine(fake, drafter(fake, kind), config=EngineConfig(num_draft_tokens=4))
        engine.add(PROMPTS[0], replace(GREEDY, **option))
        output = run(engine)[0, 0]
        assert tokens(output) == expected
        assert output.chunk.finish_reason == "stop"
        assert fake.caches[-1].final == (PROMPTS[0] + expected)[:-1]
        assert_clean(engine)


@pytest.mark.parametrize("kind", BAD)
def test_ignore_eos_goes_on(kind: str) -> None:
    fake = model(eos_token_ids=range(11))
    engine = Engine(fake, drafter(fake, kind), config=EngineConfig(num_draft_tokens=4))
    engine.add(PROMPTS[0], replace(GREEDY, ignore_eos=True))
    output = run(engine)[0, 0]
    assert tokens(output) == fake.greedy(PROMPTS[0], 14)
    assert_drafted(output, kind)


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("min_tokens", [1, 3, 6])
def test_min_tokens_holds_eos_back(kind: str, min_tokens: int) -> None:
    fake = model(eos_token_ids=range(1, 11))
    context = list(PROMPTS[0])
    while True:
        logits = fake.logits_after(context).clone()
        if len(context) - 3 < min_tokens:
            logits[1:] = -torch.inf
        context.append(int(logits.argmax()))
        if context[-1] in fake.eos_token_ids or len(context) == 17:
            break
    plan = adversaries({tuple(PROMPTS[0]): context[3:] + [0] * 9}, fake.vocab_size)[kind]
    engine = Engine(fake, plan, config=EngineConfig(num_draft_tokens=4))
    engine.add(PROMPTS[0], replace(GREEDY, min_tokens=min_tokens))
    output = run(engine)[0, 0]
    assert tokens(output) == context[3:]
    assert_drafted(output, kind)


PIECES = PieceTokenizer([text.encode() for text in ("a", "b", "ab", "ba", "é", "€", "c", "d", " ", "bab", "x")])


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("offset", range(10))
@pytest.mark.parametrize("length", [1, 2, 4])
def test_stop_strings_at_every_offset(kind: str, offset: int, length: int) -> None:
    fake = model(seed=7)
    output = fake.greedy(PROMPTS[0], 14)
    whole = PIECES.decode(output)
    stop = whole[offset : offset + length]
    at = whole.index(stop)
    count = next(n for n in range(1, 15) if stop in PIECES.decode(output[:n]))
    engine = Engine(fake, drafter(fake, kind), config=EngineConfig(num_draft_tokens=4), tokenizer=PIECES)
    for stream in (False, True):
        request_id = engine.add(PROMPTS[0], replace(GREEDY, stop=(stop,)), stream=stream)
        text = ""
        while engine.has_work:
            outputs = engine.step()
            text += "".join(each.chunk.text for each in outputs)
        choice = outputs[-1].choice
        assert choice is not None and outputs[-1].request_id == request_id
        assert (choice.text, choice.token_ids, choice.finish_reason) == (whole[:at], output[:count], "stop")
        assert text == (whole[:at] if stream else "")
        assert fake.caches[-1].final == (PROMPTS[0] + output[:count])[:-1]
        if count > 1:  # the first token comes with the prompt
            assert_drafted(outputs[-1], kind)
    assert_clean(engine)


def test_text_without_the_token_that_ended_it_and_decoded_once() -> None:
    fake = model()
    output = fake.greedy(PROMPTS[0], 14)
    fake.eos_token_ids = frozenset(output[-1:])
    tokenizer = PieceTokenizer(PIECES.pieces)
    engine = Engine(fake, None, tokenizer=tokenizer)
    engine.add(PROMPTS[0], GREEDY)
    while not (outputs := engine.step()):
        assert tokenizer.num_decoded == 0
    assert outputs[0].choice is not None
    assert outputs[0].choice.text == PIECES.decode(output[: output.index(output[-1])])


@pytest.mark.parametrize("k", [1, 4, 20])
def test_nothing_is_drafted_beyond_the_end(k: int) -> None:
    """Neither beyond max_tokens nor beyond the context; K is fixed, the number of draft tokens is not."""
    fake = model(context_length=12)
    asked: list[int] = []

    def propose(sequence: object, num_draft_tokens: int) -> list[int]:
        asked.append(num_draft_tokens)
        return [0] * num_draft_tokens

    longest = 0

    def watch(batch: Seq[object]) -> None:
        nonlocal longest
        longest = max([longest, *(rows.cache.length + len(rows.token_ids) for rows in batch)])

    fake.before_forward = watch
    engine = Engine(fake, Scripted(propose), config=EngineConfig(num_draft_tokens=k))
    engine.add([1, 2, 3], replace(GREEDY, max_tokens=100))
    output = run(engine)[0, 0]
    assert tokens(output) == fake.greedy([1, 2, 3], 9)
    assert output.chunk.finish_reason == "length"
    assert longest <= 11
    assert max(asked) == min(k, 7)


def test_first_come_first_served() -> None:
    fake = model()
    engine = Engine(fake, None, config=EngineConfig(max_batch=2))
    widths = []
    fake.before_forward = lambda batch: widths.append(len(batch))
    ids = [engine.add([1], replace(GREEDY, max_tokens=n)) for n in (2, 6, 1, 3)]
    order = [output.request_id for _ in range(20) for output in engine.step()]
    assert order == [ids[0], ids[2], ids[1], ids[3]]
    assert widths == [2] * 6
    assert_clean(engine)


def test_prompt_chunks_and_verified_drafts_share_a_forward() -> None:
    fake = model()
    engine = Engine(fake, drafter(fake, "right"), config=EngineConfig(num_draft_tokens=3, prefill_chunk=2))
    shapes: list[list[tuple[int, int | None]]] = []
    fake.before_forward = lambda batch: shapes.append([(len(rows.token_ids), rows.num_logits) for rows in batch])
    engine.add(PROMPTS[1], GREEDY)
    engine.step()
    engine.add(PROMPTS[2], GREEDY)
    run(engine)
    assert shapes[0] == [(4, 4)]
    assert shapes[1:4] == [[(2, 0), (4, 4)], [(2, 0), (4, 4)], [(2, 0), (2, 2)]]
    assert shapes[4] == [(4, 4)]  # the first has ended; the last token of the other's prompt takes a draft along


def test_policies_are_told_which_step_comes_after_a_prompt() -> None:
    told = []

    class Recording(FixedPolicy):
        def observe(self, cost: StepCost, outcomes: Seq[DraftOutcome]) -> None:
            told.append(cost.is_after_prompt)

    fake = model()
    engine = Engine(fake, drafter(fake, "empty"), policy=Recording(4))
    for _ in range(2):
        engine.add(PROMPTS[0], replace(GREEDY, max_tokens=4))
        run(engine)
    assert told == [False, True, False, False] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_abort_frees_and_reports(stream: bool) -> None:
    fake = model()
    engine = Engine(
        fake, drafter(fake, "random"), tokenizer=PIECES, config=EngineConfig(num_draft_tokens=4, max_batch=1)
    )
    ids = [engine.add(prompt, GREEDY, stream=stream) for prompt in PROMPTS[:3]]
    engine.step()
    engine.abort(ids[0])
    engine.abort(ids[2])
    engine.abort(12345)
    last = run(engine)
    assert last[ids[0], 0].chunk.finish_reason == last[ids[2], 0].chunk.finish_reason == "abort"
    done = tokens(last[ids[0], 0])
    assert len(done) >= 1 and done == fake.greedy(PROMPTS[0], 14)[: len(done)]
    assert tokens(last[ids[1], 0]) == fake.greedy(PROMPTS[1], 14)
    assert_clean(engine)


def test_close_frees_everything() -> None:
    fake = model()
    engine = Engine(fake, drafter(fake, "right"), config=EngineConfig(max_batch=2))
    for prompt in PROMPTS:
        engine.add(prompt, GREEDY)
    engine.step()
    engine.close()
    assert not engine.has_work
    assert_clean(engine)


class Poison(Exception):
    pass


def poisoned(place: str, fake: FakeModel, plan: Scripted) -> None:
    """Make one place fail for the sequence whose prompt begins with 5."""

    def check(first: int) -> None:
        if first == 5:
            raise Poison

    if place == "forward":
        fake.before_forward = lambda batch: [check((rows.cache.tokens or rows.token_ids)[0]) for rows in batch] and None
        return
    inner = getattr(plan, place)
    if place == "start":
        plan.start = lambda sequence: (inner(sequence), check(sequence.token_ids[0]))[0]
    elif place == "draft":
        plan.draft = lambda sequences, num_draft_tokens, min_acceptance_prob: (
            [check(each.token_ids[0]) for each in sequences] and inner(sequences, num_draft_tokens, min_acceptance_prob)
        )
    else:
        plan.commit = lambda steps: [check(each.sequence.token_ids[0]) for each in steps] and inner(steps)


@pytest.mark.parametrize("place", ["forward", "start", "draft", "commit"])
def test_an_error_ends_its_own_sequence_only(place: str) -> None:
    fake = model()
    plan = drafter(fake, "random")
    engine = Engine(fake, plan, config=EngineConfig(num_draft_tokens=4, prefill_chunk=3))
    poisoned(place, fake, plan)
    ids = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    last = run(engine)
    for request_id, prompt in zip(ids, PROMPTS):
        output = last[request_id, 0]
        if prompt[0] == 5:
            assert isinstance(output.error, Poison)
            assert output.choice is None
        else:
            assert output.error is None
            assert tokens(output) == fake.greedy(prompt, 14)
    assert_clean(engine)


class Illiterate(PieceTokenizer):
    """Cannot decode the token that ends the first prompt's output."""

    broken = -1

    def decode(self, ids: Seq[int], **options: object) -> str:
        if self.broken in ids:
            raise Poison
        return super().decode(ids, **options)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tokenizer_that_fails_ends_its_own_sequence_only(stream: bool) -> None:
    fake = model(vocab_size=40, seed=2)
    prompts = [[1, 2, 3], [4]]
    outputs = [fake.greedy(prompt, 14) for prompt in prompts]
    tokenizer = Illiterate([b"a"] * 40)
    tokenizer.broken = next(token for token in outputs[0] if token not in outputs[1])
    engine = Engine(fake, None, tokenizer=tokenizer)
    ids = [engine.add(prompt, GREEDY, stream=stream) for prompt in prompts]
    last = run(engine)
    assert isinstance(last[ids[0], 0].error, Poison)
    assert tokens(last[ids[1], 0]) == outputs[1]
    assert_clean(engine)


def test_a_drafter_that_fails_to_let_go_does_not_keep_the_cache() -> None:
    fake = model()
    plan = drafter(fake, "right")

    def stop(_: object) -> None:
        raise Poison

    plan.stop = stop
    engine = Engine(fake, plan)
    engine.add(PROMPTS[0], GREEDY)
    assert tokens(run(engine)[0, 0]) == fake.greedy(PROMPTS[0], 14)
    assert fake.caches[0].freed


def test_ctrl_c_in_a_step_loses_nothing() -> None:
    fake = model()
    engine = Engine(fake, drafter(fake, "right"), config=EngineConfig(num_draft_tokens=2))
    engine.add(PROMPTS[0], GREEDY)
    engine.step()
    hits = iter([True])

    def interrupt(_: object) -> None:
        if next(hits, False):
            raise KeyboardInterrupt

    fake.before_forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert tokens(run(engine)[0, 0]) == fake.greedy(PROMPTS[0], 14)
    assert_clean(engine)


@pytest.mark.parametrize(
    "proposal",
    [
        [0] * 9,
        [99],
        [-1],
        Draft([1, 2], [0, 0]),
        Draft([1, 2], [-1]),
    ],
    ids=["too many nodes", "above the vocabulary", "below 0", "its own parent", "a parent too few"],
)
def test_a_drafter_that_breaks_its_contract_is_named(proposal: Draft | list[int]) -> None:
    engine = Engine(model(), Scripted(lambda *_: proposal), config=EngineConfig(num_draft_tokens=4))
    engine.add(PROMPTS[1], GREEDY)
    assert isinstance(run(engine)[0, 0].error, DrafterError)
    assert_clean(engine)


def test_statistics() -> None:
    fake = model()
    reference = fake.greedy(PROMPTS[1], 40)
    wrong_third = Scripted(
        lambda sequence, num_draft_tokens: [
            token_id if i != 2 else (token_id + 1) % 11
            for i, token_id in enumerate(reference[sequence.num_output : sequence.num_output + num_draft_tokens])
        ]
    )
    engine = Engine(fake, wrong_third, config=EngineConfig(num_draft_tokens=4))
    engine.add(PROMPTS[1], replace(GREEDY, max_tokens=16))
    steps = []
    while not (outputs := engine.step()):
        steps.append(engine.last_step)
    stats = outputs[0].chunk.stats
    assert stats is not None
    # five steps of three tokens, the fifth with room for a draft of three; the sixth has none
    assert (stats.num_tokens, stats.num_forwards) == (16, 6)
    assert stats.drafted_per_position == [5, 5, 5, 4]
    assert stats.reached_per_position == [5, 5, 5, 0]
    assert stats.accepted_per_position == [5, 5, 0, 0]
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (19, 10)
    assert stats.acceptance_rate == 10 / 19
    assert stats.mean_acceptance_length == pytest.approx(16 / 6)
    assert stats.time_total >= stats.time_draft + stats.time_target + stats.time_verify
    assert stats.time_target > 0 and stats.tokens_per_second > 0
    assert all((s.num_rows, s.num_draft_tokens, s.num_accepted_tokens, s.num_tokens) == (5, 4, 2, 3) for s in steps[:4])


def test_accepted_counts_what_was_committed_at_a_stop() -> None:
    fake = model()
    reference = fake.greedy(PROMPTS[0], 14)
    fake.eos_token_ids = frozenset([reference[2]])
    assert reference.index(reference[2]) == 2
    engine = Engine(fake, drafter(fake, "right"), config=EngineConfig(num_draft_tokens=5, prefill_chunk=2))
    engine.add(PROMPTS[0], GREEDY, stream=True)
    chunks = [output.chunk for _ in range(9) for output in engine.step()]
    assert chunks[-1].token_ids == reference[:3]
    assert chunks[-1].num_accepted_draft == 3
    assert chunks[-1].stats is not None and chunks[-1].stats.accepted_per_position == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("chunk", [3, 5, 256])
def test_logprobs_are_the_models_own(kind: str, chunk: int) -> None:
    fake = model()
    prompt = PROMPTS[2]
    engine = Engine(fake, drafter(fake, kind), config=EngineConfig(num_draft_tokens=4, prefill_chunk=chunk))
    engine.add(prompt, replace(GREEDY, logprobs=2, prompt_logprobs=1), stream=True)
    streamed = []
    while engine.has_work:
        for output in engine.step():
            streamed += output.chunk.logprobs or []
    assert output.choice is not None and output.choice.logprobs == streamed
    assert_drafted(output, kind)
    sequence = prompt + fake.greedy(prompt, 14)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    reports = output.prompt_logprobs + streamed
    assert len(reports) == len(sequence)
    for i in range(1, len(sequence)):
        distribution = torch.log_softmax(fake.logits_after(sequence[:i]), 0)
        report = reports[i]
        assert report is not None and report.token_id == sequence[i]
        assert report.logprob == pytest.approx(float(distribution[sequence[i]]))
        count = 1 if i < len(prompt) else 2
        assert [token_id for token_id, _ in report.top] == distribution.topk(count).indices.tolist()


@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        ([], {}, PromptError, "empty"),
        ([1] * 20, {}, PromptError, "Shorten"),
        ([1, 11], {}, PromptError, "Token 11 at position 1"),
        ([1, -1], {}, PromptError, "Token -1"),
        ([1], {"stop": ["x"]}, SamplingError, "no tokenizer"),
        ([1], {"stop_token_ids": [11]}, SamplingError, "stop_token_ids names token 11"),
        ([1], {"logit_bias": {500: 1.0}}, SamplingError, "logit_bias names token 500"),
    ],
)
def test_bad_requests_are_refused(prompt: list[int], params: dict[str, object], error: type, words: str) -> None:
    engine = Engine(model(context_length=20))
    with pytest.raises(error, match=words):
        engine.add(prompt, SamplingParams(**params))
    assert not engine.has_work


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="typical"):
        Engine(model(), config=EngineConfig(acceptance="hope"))


def test_zero_draft_tokens_leave_the_drafter_alone() -> None:
    fake = model()
    plan = drafter(fake, "right")
    engine = Engine(fake, plan, config=EngineConfig(num_draft_tokens=0))
    engine.add(PROMPTS[0], GREEDY)
    assert tokens(run(engine)[0, 0]) == fake.greedy(PROMPTS[0], 14)
    assert plan.steps == []


def test_a_policy_keeps_its_drafter_at_zero_draft_tokens() -> None:
    for k in (0, 3):
        fake = model()
        plan = drafter(fake, "right")
        engine = Engine(fake, plan, config=EngineConfig(num_draft_tokens=0), policy=FixedPolicy(k))
        engine.add(PROMPTS[0], GREEDY)
        assert tokens(run(engine)[0, 0]) == fake.greedy(PROMPTS[0], 14)
        assert plan.steps
        assert any(len(step.draft) for step in plan.steps if step.draft is not None) == (k > 0)


def test_a_short_draft_reaches_no_further_than_it_is_long() -> None:
    """Nine short drafts, right to their end, and four long ones, wrong at their second token."""
    fake = model()
    reference = fake.greedy(PROMPTS[1], 60)
    lengths = iter([1] * 9 + [3] * 4)

    def propose(sequence: Sequence, num_draft_tokens: int) -> list[int]:
        length = next(lengths, 0)
        ids = reference[sequence.num_output : sequence.num_output + length]
        return ids if length < 2 else [ids[0], *((token_id + 1) % 11 for token_id in ids[1:])]

    engine = Engine(fake, Scripted(propose), config=EngineConfig(num_draft_tokens=4))
    engine.add(PROMPTS[1], replace(GREEDY, max_tokens=40))
    stats = run(engine)[0, 0].chunk.stats
    assert stats is not None
    assert stats.drafted_per_position == [13, 4, 4]
    assert stats.reached_per_position == [13, 4, 0]
    assert stats.accepted_per_position == [13, 0, 0]


def test_the_last_step_is_that_of_all_its_sequences_though_each_was_tried_alone() -> None:
    fake = model()
    engine = Engine(fake, drafter(fake, "right"), config=EngineConfig(num_draft_tokens=2))
    for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[3]):
        engine.add(prompt, GREEDY)
    engine.step()
    engine.step()
    expected, hits = engine.last_step, iter([True])

    def fail(batch: Seq[object]) -> None:
        if len(batch) > 1 and next(hits, False):
            raise Poison

    fake.before_forward = fail
    engine.step()
    stats = engine.last_step
    assert next(hits, None) is None
    for name in ("num_sequences", "num_rows", "num_draft_tokens", "num_accepted_tokens", "num_tokens"):
        assert getattr(stats, name) == getattr(expected, name) > 0
    assert stats.time_total >= stats.time_target > 0
