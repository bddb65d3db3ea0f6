"""SmolLM2's tokenizer from its GGUF metadata gives the ids that llama.cpp gives for the same file.

tests/data/smollm2-ids.json.xz holds a thousand texts, each with the ids of `llama_tokenize(add_special=false,
parse_special=true)`: prose and code, digits, emoji, accents and combining marks, a dozen scripts, white space of every
kind, control characters, and the special tokens whole, broken and adjacent.
"""

from __future__ import annotations

import json
import lzma
from typing import Any

import pytest

from forerun.engine.text import TextStream, TokenTexts
from forerun.models.loading.gguf.tokenizer import eos_token_ids, read_tokenizer
from gguf_metadata import DATA, smollm2
from small_tokenizers import decoded

LOST = frozenset("\x04\x06\x13\x14\x16\x1d\U000f0000\U0010fffd")
"""Characters with a byte that is no token of this vocabulary."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return read_tokenizer(smollm2(), "SmolLM2.gguf")


@pytest.fixture(scope="module")
def reference() -> list[tuple[str, list[int]]]:
    lines = json.loads(lzma.decompress((DATA / "smollm2-ids.json.xz").read_bytes()))
    assert len(lines) == 1000
    return [(text, ids) for text, ids in lines]


def test_ids_are_those_of_llama_cpp(tokenizer: Any, reference: list[tuple[str, list[int]]]) -> None:
    found = tokenizer([text for text, _ in reference], add_special_tokens=True)["input_ids"]
    assert [text for (text, ids), ours in zip(reference, found) if ours != ids] == []


def test_decoding_gives_the_text_back(tokenizer: Any, reference: list[tuple[str, list[int]]]) -> None:
    for text, ids in reference:
        if not LOST & set(text):
            assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_streamed_text_is_the_whole_text(tokenizer: Any, reference: list[tuple[str, list[int]]]) -> None:
    texts = TokenTexts(tokenizer)
    for _, ids in reference[::3]:
        stream, pieces = TextStream(texts, []), []
        for token_id in ids:
            stream.push([token_id])
            pieces.append(stream.take())
        stream.finish()
        assert "".join([*pieces, stream.take()]) == stream.text == decoded(tokenizer, ids)


def test_special_tokens_and_ends(tokenizer: Any) -> None:
    assert (len(tokenizer), tokenizer.eos_token, tokenizer.bos_token) == (49152, "<|im_end|>", "<|im_start|>")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 2, 0)
    ends = eos_token_ids(smollm2(), "it.gguf")
    assert ends == set(tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>", "<reponame>"]))


def test_the_chat_template_ends_turns_with_the_end_token(tokenizer: Any) -> None:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    assert ids.count(2) == 2 and ids[0] == 1
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
