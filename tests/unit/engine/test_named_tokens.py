"""Tokens that a request allows or forbids, what its text shows, and what ended it: with drafts as without."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest

from doubles import FakeModel, Scripted, adversaries
from forerun import LLM, SamplingParams
from forerun.config import EngineConfig
from forerun.engine import Engine
from forerun.engine.results import Choice
from forerun.errors import GrammarDeadEndError, SamplingError
from small_tokenizers import END, byte_level, ids_of

TOKENIZER = byte_level()
(EOS,) = ids_of(TOKENIZER, END)
PROMPT = [1, 2, 3]
SIZE = len(TOKENIZER)


def model() -> Any:
    return FakeModel(vocab_size=SIZE, eos_token_ids=[EOS])


def answered(plan: Scripted | None, params: SamplingParams, *, stream: bool = False) -> tuple[Choice, str]:
    """The finished choice of a request, and its streamed text."""
    engine = Engine(model(), plan, config=EngineConfig(num_draft_tokens=5), tokenizer=TOKENIZER)
    engine.add(PROMPT, params, stream=stream)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    choice = outputs[-1].choice
    assert choice is not None
    return choice, "".join(output.chunk.text for output in outputs)


def plans() -> Seq[Scripted | None]:
    fake = model()
    return [None, *adversaries({tuple(PROMPT): fake.greedy(PROMPT, 40)}, SIZE).values()]


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **options})


@pytest.mark.parametrize("seed", [None, 3])
def test_allowed_tokens_alone_are_generated(seed: int | None) -> None:
    allowed = [7, 9, 30, 31]
    options = {"temperature": 1.0, "seed": seed} if seed else {}
    found = [answered(plan, greedy(allowed_token_ids=allowed, **options))[0].token_ids for plan in plans()]
    assert {*found[0]} <= {*allowed} and len({*found[0]}) > 1
    assert all(each == found[0] for each in found)


def test_a_bias_lifts_no_token_that_is_not_allowed() -> None:
    choice, _ = answered(None, greedy(allowed_token_ids=[7], logit_bias={8: 1e30}, repetition_penalty=2))
    assert {*choice.token_ids} == {7}


def test_tokens_that_may_not_follow_others() -> None:
    usual = answered(None, greedy())[0].token_ids
    words = [usual[2:5], usual[:1]]
    found = [answered(plan, greedy(bad_words=words))[0].token_ids for plan in plans()]
    assert found[0] != usual and all(each == found[0] for each in found)
    assert usual[0] not in found[0]
    assert all(found[0][at : at + 3] != usual[2:5] for at in range(12))


def test_the_prompt_is_no_part_of_what_a_bad_word_ends() -> None:
    first = answered(None, greedy(max_tokens=1))[0].token_ids
    assert answered(None, greedy(max_tokens=1, bad_words=[[*PROMPT[-1:], *first]]))[0].token_ids == first


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}])
def test_lists_that_leave_no_token_end_the_request(options: dict[str, Any]) -> None:
    llm = LLM(model(), None, tokenizer=TOKENIZER)
    params = greedy(allowed_token_ids=[7], bad_words=[[7]], **options)
    with pytest.raises(GrammarDeadEndError, match="allowed_token_ids and bad_words leave no token here"):
        llm.generate(PROMPT, params)


def test_bad_words_are_texts() -> None:
    usual, _ = answered(None, greedy(max_tokens=30))
    word = TOKENIZER.decode(usual.token_ids[4:5])
    choice, _ = answered(None, greedy(max_tokens=30, bad_words=[word]))
    assert usual.token_ids[4] in usual.token_ids and usual.token_ids[4] not in choice.token_ids


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"allowed_token_ids": []}, "empty"),
        ({"allowed_token_ids": [SIZE]}, "allowed_token_ids names token"),
        ({"allowed_token_ids": [EOS], "min_tokens": 2}, "min_tokens forbids"),
        ({"bad_words": "ab"}, "a list of strings"),
        ({"bad_words": [""]}, "non-empty"),
        ({"bad_words": [[SIZE]]}, "bad_words names token"),
        ({"bad_words": ["\ud800"]}, "is not Unicode"),
    ],
    ids=str,
)
def test_what_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SamplingError, match=said):
        LLM(model(), None, tokenizer=TOKENIZER).generate([1], **options)


def test_a_seed_of_minus_one_is_none() -> None:
    assert SamplingParams(seed=-1) == SamplingParams()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
def test_what_ends_an_answer_is_told_and_shown_on_request(stream: bool, keeps: bool) -> None:
    usual, _ = answered(None, greedy())
    token = next(each for each in usual.token_ids[3:] if each not in usual.token_ids[:3])
    at = usual.token_ids.index(token)
    text = usual.text[3:5]
    for plan in plans():
        by_token, streamed = answered(
            plan, greedy(stop_token_ids=[token], include_stop_str_in_output=keeps), stream=stream
        )
        shown = usual.token_ids[: at + keeps]
        assert by_token.text == TOKENIZER.decode(shown, skip_special_tokens=True) and by_token.stop_reason == token
        assert streamed == (by_token.text if stream else "")
        by_text, streamed = answered(plan, greedy(stop=[text], include_stop_str_in_output=keeps), stream=stream)
        end = usual.text.index(text) + len(text) * keeps
        assert (by_text.text, by_text.stop_reason) == (usual.text[:end], text)
        assert streamed == (by_text.text if stream else "")


def test_the_end_of_a_text_has_no_reason_of_its_own_unless_it_was_asked_for() -> None:
    to_the_end = {"logit_bias": {EOS: 1e6}, "ignore_eos": False}
    assert answered(None, greedy(**to_the_end))[0].stop_reason is None
    assert answered(None, greedy(**to_the_end, stop_token_ids=[EOS]))[0].stop_reason is None
    assert answered(None, greedy(logit_bias={EOS: 1e6}, stop_token_ids=[EOS]))[0].stop_reason == EOS
    assert answered(None, greedy(logit_bias={EOS: 1e6}, stop=[END]))[0].stop_reason == END
    assert answered(None, greedy())[0].stop_reason is None


@pytest.mark.parametrize("stream", [False, True])
def test_special_tokens_are_shown_on_request(stream: bool) -> None:
    bias = {"logit_bias": {EOS: 1e6}, "max_tokens": 2}
    for plan in plans():
        shown, streamed = answered(plan, greedy(**bias, skip_special_tokens=False), stream=stream)
        assert shown.text == END * 2 and streamed == END * 2 * stream
        assert answered(plan, greedy(**bias), stream=stream)[0].text == ""
    ended, _ = answered(None, greedy(**bias, ignore_eos=False, skip_special_tokens=False))
    whole, _ = answered(
        None, greedy(**bias, ignore_eos=False, skip_special_tokens=False, include_stop_str_in_output=True)
    )
    assert (ended.text, whole.text) == ("", END)


@pytest.mark.parametrize("stream", [False, True])
def test_a_special_token_that_is_a_stop_string_is_in_the_text_on_request(stream: bool) -> None:
    usual = answered(None, greedy())[0]
    params = greedy(stop=[END], include_stop_str_in_output=True, logit_bias={EOS: 1e30}, min_tokens=3)
    choice, text = answered(None, params, stream=stream)
    assert choice.stop_reason == END and choice.token_ids == [*usual.token_ids[:3], EOS]
    assert choice.text.endswith(END) and (not stream or text == choice.text)
