"""Where an output ends: what goes before what when several ends fall together, and what min_tokens exempts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest

from doubles import FakeModel, PieceTokenizer, Scripted, adversaries
from forerun.config import EngineConfig, SamplingParams
from forerun.engine import Engine
from forerun.engine.results import Choice

PROMPT = [1, 2, 3]
LENGTH = 14
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH)
PIECES = PieceTokenizer([text.encode() for text in ("a", "b", "ab", "ba", "é", "€", "c", "d", " ", "bab", "x")])
KINDS = ["right", "tree", "duplicated", "random"]


def drafter(fake: FakeModel, kind: str) -> Scripted:
    return adversaries({tuple(PROMPT): fake.greedy(PROMPT, 60)}, fake.vocab_size)[kind]


def ended(fake: FakeModel, plan: Scripted | None, params: SamplingParams, k: int = 5) -> Choice:
    """The finished choice of one request."""
    engine = Engine(fake, plan, config=EngineConfig(num_draft_tokens=k), tokenizer=PIECES)
    engine.add(PROMPT, params)
    while engine.has_work:
        outputs = engine.step()
    choice = outputs[-1].choice
    assert choice is not None
    return choice


def streamed(fake: FakeModel, plan: Scripted | None, params: SamplingParams, k: int = 5) -> tuple[str, Choice]:
    """The text of all chunks of one request, and its finished choice."""
    engine = Engine(fake, plan, config=EngineConfig(num_draft_tokens=k), tokenizer=PIECES)
    engine.add(PROMPT, params, stream=True)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    choice = outputs[-1].choice
    assert choice is not None
    return "".join(output.chunk.text for output in outputs), choice


def stopped(output: Seq[int], stops: Seq[str], min_tokens: int) -> tuple[int | None, str]:
    """The definition: decode every prefix; a stop string counts if a token at or after min_tokens completes it."""
    before = 0
    for count in range(1, len(output) + 1):
        text = PIECES.decode(output[:count]).rstrip("\ufffd")
        if count >= min_tokens:
            found = [
                at for stop in stops for at in range(len(text)) if text.startswith(stop, at) and at + len(stop) > before
            ]
            if found:
                return count, text[: min(found)]
        before = max(before, len(text))
    return None, PIECES.decode(output)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 5, 8, 11])
def test_stop_strings_are_passed_over_before_min_tokens(kind: str, min_tokens: int) -> None:
    """Every text of one or two characters that the output holds, at every place."""
    accepted, ends = 0, set()
    for seed in (7, 11):
        fake = FakeModel(seed=seed)
        output = fake.greedy(PROMPT, LENGTH)
        whole = PIECES.decode(output)
        for stop in sorted({whole[at : at + length] for at in range(10) for length in (1, 2)}):
            choice = ended(fake, drafter(fake, kind), replace(GREEDY, stop=(stop,), min_tokens=min_tokens))
            count, text = stopped(output, [stop], min_tokens)
            assert (choice.token_ids, choice.text) == (output[:count], text), stop
            assert choice.finish_reason == ("length" if count is None else "stop")
            accepted += choice.stats.num_accepted_tokens
            ends.add(count)
    assert accepted > 20 or kind == "random", accepted
    assert len(ends) > 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", range(1, 9))
def test_a_stop_at_the_last_place_is_a_stop(kind: str, length: int) -> None:
    """The token that ends the output by its id, or completes a stop string, is also the last that max_tokens allows."""
    fake = FakeModel(seed=5)
    output = fake.greedy(PROMPT, LENGTH)
    last = output[length - 1]
    if last not in output[: length - 1]:
        choice = ended(fake, drafter(fake, kind), replace(GREEDY, max_tokens=length, stop_token_ids=(last,)))
        assert (choice.token_ids, choice.finish_reason) == (output[:length], "stop")
        assert choice.text == PIECES.decode(output[: length - 1])
        if length > 1:
            choice = ended(fake, drafter(fake, kind), replace(GREEDY, max_tokens=length - 1, stop_token_ids=(last,)))
            assert (choice.token_ids, choice.finish_reason) == (output[: length - 1], "length")
            assert choice.text == PIECES.decode(output[: length - 1])
    before, whole = PIECES.decode(output[: length - 1]), PIECES.decode(output[:length])
    stop = whole[len(before) - 1 :] if before else whole
    if stop not in before and "\ufffd" not in whole:
        choice = ended(fake, drafter(fake, kind), replace(GREEDY, max_tokens=length, stop=(stop,)))
        assert (choice.token_ids, choice.finish_reason) == (output[:length], "stop")
        assert choice.text == whole[: whole.index(stop)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [(), ("not there",)], ids=["", "beside a stop string"])
def test_a_stream_has_the_text_of_the_whole(kind: str, stop: tuple[str, ...]) -> None:
    """The token that ends it by its id is no part of either, though it has a text."""
    fake = FakeModel(seed=5)
    output = fake.greedy(PROMPT, LENGTH)
    for length in range(1, 9):
        params = replace(GREEDY, stop_token_ids=(output[length - 1],), stop=stop)
        whole = ended(fake, drafter(fake, kind), params)
        text, choice = streamed(fake, drafter(fake, kind), params)
        first = output.index(output[length - 1])
        assert text == choice.text == whole.text == PIECES.decode(output[:first])
        assert choice.token_ids == whole.token_ids == output[: first + 1]


def test_the_cases_above_are_there() -> None:
    output = FakeModel(seed=5).greedy(PROMPT, 8)
    assert len(set(output)) >= 6
    assert "\ufffd" not in PIECES.decode(output)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_against_max_tokens_one_token_earlier(kind: str) -> None:
    fake = FakeModel(seed=7)
    output = fake.greedy(PROMPT, LENGTH)
    for count in range(2, 10):
        stop = PIECES.decode(output[count - 2 : count])
        if stopped(output, [stop], 0)[0] != count:
            continue
        for max_tokens, reason in ((count - 1, "length"), (count, "stop"), (count + 1, "stop")):
            choice = ended(fake, drafter(fake, kind), replace(GREEDY, max_tokens=max_tokens, stop=(stop,)))
            assert choice.finish_reason == reason
            assert choice.token_ids == output[: min(count, max_tokens)]


@pytest.mark.parametrize("kind", ["right", "tree"])
def test_a_stop_token_before_min_tokens_in_the_same_step_as_one_after(kind: str) -> None:
    """min_tokens holds a stop token back in the logits; a draft of it is refused there, and taken from then on."""
    fake = FakeModel(seed=5)
    output = fake.greedy(PROMPT, LENGTH)
    for min_tokens in range(1, 8):
        plain = ended(fake, None, replace(GREEDY, min_tokens=min_tokens, stop_token_ids=(output[3], output[6])), 0)
        plan = adversaries({tuple(PROMPT): [*plain.token_ids, *output]}, fake.vocab_size)[kind]
        choice = ended(fake, plan, replace(GREEDY, min_tokens=min_tokens, stop_token_ids=(output[3], output[6])))
        assert (choice.token_ids, choice.finish_reason) == (plain.token_ids, plain.finish_reason)
        assert len(choice.token_ids) > min_tokens or choice.token_ids[-1] in (output[3], output[6])
        assert choice.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("min_tokens", [0, 1, 2, 4, 7])
def test_where_every_token_is_a_stop_min_tokens_still_holds(kind: str, min_tokens: int) -> None:
    """Then none can be held back in the logits, and the ends before min_tokens are passed over."""
    fake = FakeModel(seed=5, eos_token_ids=range(11))
    choice = ended(fake, drafter(fake, kind), replace(GREEDY, min_tokens=min_tokens))
    assert (choice.token_ids, choice.finish_reason) == (fake.greedy(PROMPT, min_tokens + 1), "stop")
