"""Text of random tokens in random blocks: streamed, whole, plain and speculative are one, stop strings included."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest
from hypothesis import given, strategies as st

from doubles import FakeModel, adversaries
from forerun import LLM, SamplingParams
from forerun.engine.text import StopStrings, TextStream, TokenTexts
from fuzzing import examples
from small_tokenizers import TURN, byte_level, decoded, sentence_piece

TOKENIZERS = {
    "byte-level": byte_level(),
    "llama": sentence_piece("llama"),
    "metaspace": sentence_piece("metaspace"),
}
TEXTS = {name: TokenTexts(tokenizer) for name, tokenizer in TOKENIZERS.items()}
STRINGS = ("a", "hello", "o w", " world", "€", "\ufffd", "a!", "!!", " ", "\ufffda", "é", TURN)


@st.composite
def tokens(draw: st.DrawFn, name: str, size: int) -> list[int]:
    """Ids of all kinds, words and bytes of whole characters more often than chance has them; ids of no token too."""
    tokenizer = TOKENIZERS[name]
    count = len(tokenizer)
    end = st.integers(count - 40, count + 1)
    return draw(st.lists(st.one_of(st.integers(0, count - 1), end, end), max_size=size))


def shown(texts: TokenTexts, prompt: Seq[int], blocks: Seq[Seq[int]], stops: Seq[str], exempt: int) -> Any:
    """The tokens that were taken, and the text, once in pieces and once whole."""
    stream = TextStream(texts, prompt, StopStrings(stops))
    pieces, done = [], 0
    for block in blocks:
        stopped = stream.push(block, min(max(exempt - done, 0), len(block)))
        pieces.append(stream.take())
        if stopped is not None:
            assert "".join(pieces) == stream.text
            return done + stopped, stream.text
        done += len(block)
    stream.finish()
    pieces.append(stream.take())
    assert "".join(pieces) == stream.text
    return done, stream.text


def cut(ids: Seq[int], sizes: Seq[int]) -> list[list[int]]:
    """The list in blocks of these sizes, over and over."""
    blocks, start = [], 0
    while start < len(ids):
        size = sizes[len(blocks) % len(sizes)]
        blocks.append(list(ids[start : start + size]))
        start += size
    return blocks


@pytest.mark.parametrize("name", TOKENIZERS)
@examples(60)
@given(data=st.data())
def test_the_text_does_not_depend_on_the_blocks(name: str, data: st.DataObject) -> None:
    prompt, ids = data.draw(tokens(name, 12)), data.draw(tokens(name, 24))
    stops = data.draw(st.lists(st.sampled_from(STRINGS), max_size=3))
    exempt = data.draw(st.sampled_from([0, 0, 3]))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    single = shown(TEXTS[name], prompt, cut(ids, [1]), stops, exempt)
    assert shown(TEXTS[name], prompt, cut(ids, sizes), stops, exempt) == single
    assert shown(TEXTS[name], prompt, [ids], stops, exempt) == single


@pytest.mark.parametrize("name", TOKENIZERS)
@examples(60)
@given(data=st.data())
def test_the_text_is_what_decoding_adds_to_the_prompt(name: str, data: st.DataObject) -> None:
    prompt, ids = data.draw(tokens(name, 12)), data.draw(tokens(name, 24))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    before, whole = (decoded(TOKENIZERS[name], part) for part in (prompt, prompt + ids))
    _, text = shown(TEXTS[name], prompt, cut(ids, sizes), (), 0)
    if name == "byte-level" or "\ufffd" not in before + whole:
        common = next((at for at, (one, other) in enumerate(zip(before, whole)) if one != other), len(before))
        assert text == whole[common:]


@pytest.mark.parametrize("name", TOKENIZERS)
@examples(6)
@given(data=st.data())
def test_streams_and_answers_are_one_with_and_without_speculation(name: str, data: st.DataObject) -> None:
    tokenizer, seed = TOKENIZERS[name], data.draw(st.integers(0, 10**6))
    target = FakeModel(len(tokenizer) + 2, seed=seed, num_contexts=499)
    prompt = data.draw(tokens(name, 6).filter(bool))
    drafter = adversaries({tuple(prompt): target.greedy(prompt, 60)}, target.vocab_size)["right"]
    stops = data.draw(st.lists(st.sampled_from(STRINGS), max_size=2))
    params = SamplingParams(temperature=0, max_tokens=40, stop=stops, min_tokens=data.draw(st.sampled_from([0, 5])))
    plain = LLM(target, None, tokenizer=tokenizer).generate(prompt, params)
    k = data.draw(st.integers(1, 9))
    for llm in (LLM(target, None, tokenizer=tokenizer), LLM(target, drafter, tokenizer=tokenizer, num_draft_tokens=k)):
        result = llm.generate(prompt, params)
        assert (result.text, result.token_ids) == (plain.text, plain.token_ids)
        chunks = list(llm.stream(prompt, params))
        assert "".join(chunk.text for chunk in chunks) == plain.text
        assert [token_id for chunk in chunks for token_id in chunk.token_ids] == plain.token_ids
