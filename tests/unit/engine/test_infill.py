"""Prompts that fill in the middle, in Python: beside others, streamed, and with what ends them."""

from __future__ import annotations

import asyncio

import pytest

from forerun import LLM, AsyncLLM, SamplingParams
from forerun.chat.infill import Infill
from forerun.errors import ContextLengthError, PromptError
from serving import fake_llm, filling_llm

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return filling_llm()


def test_the_same_text_with_and_without_a_drafter(llm: LLM) -> None:
    for suffix in ("world", "hello\n", ""):
        drafted = llm.infill("hello ", suffix, [("a", "b")], GREEDY)
        plain = llm.infill("hello ", suffix, [("a", "b")], GREEDY, drafter="none")
        assert drafted.token_ids == plain.token_ids
        assert drafted.text == plain.text


def test_beside_other_prompts_each_has_its_own_ends(llm: LLM) -> None:
    text, middle = llm.generate(["hello", Infill("hello", "world")], GREEDY)
    assert text.token_ids == llm.generate("hello", GREEDY).token_ids
    assert middle.token_ids == llm.infill("hello", "world", (), GREEDY).token_ids
    params = [GREEDY, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)]
    two = llm.generate([Infill("hello", "world"), Infill("b", "a")], params)
    assert two[0].token_ids == middle.token_ids
    assert len(two[1].token_ids) == 3


def test_a_token_of_the_family_ends_the_middle_and_is_no_text(llm: LLM) -> None:
    pad = llm.tokenizer.convert_tokens_to_ids("<|fim_pad|>")
    answer = llm.infill("a", "b", temperature=0, max_tokens=5, logit_bias={pad: 99.0})
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("", [pad], "stop")
    assert answer.choices[0].stop_reason is None
    on = llm.infill("a", "b", temperature=0, max_tokens=5, logit_bias={pad: 99.0}, ignore_eos=True)
    assert on.token_ids == [pad] * 5


def test_streams_and_async_answers_are_the_same(llm: LLM) -> None:
    whole = llm.infill("hello", "world", (), GREEDY).text
    assert "".join(chunk.text for chunk in llm.stream(Infill("hello", "world"), GREEDY)) == whole

    async def answered() -> str:
        async with AsyncLLM(llm) as engine:
            return (await engine.generate(Infill("hello", "world"), GREEDY)).text

    assert asyncio.run(answered()) == whole


def test_left_out_files_are_a_warning(llm: LLM) -> None:
    answer = llm.infill("a", "b", [("old", "x" * 600), ("new", "y")], max_tokens=2)
    assert answer.warnings == ["The context has no room for the oldest 1 of the extra files: left out."]
    assert llm.infill("a", "b", [("new", "y")], max_tokens=2).warnings == []


def test_what_cannot_be_filled_in_is_refused(llm: LLM) -> None:
    with pytest.raises(PromptError, match="fake has no tokens that fill in the middle"):
        fake_llm().infill("a", "b")
    with pytest.raises(ContextLengthError, match="but the context of fake holds 512"):
        llm.infill("a" * 300, "b" * 300)
    with pytest.raises(PromptError, match="lone surrogates"):
        llm.infill("a", "\ud800")
    with pytest.raises(PromptError, match="A chat is a list of messages"):
        llm.chat([Infill("a", "b")])  # type: ignore[list-item]
