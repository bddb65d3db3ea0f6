"""Metadata of GGUF files, as tests need it: SmolLM2's, of which tests/data has the vocabulary, and small ones."""

from __future__ import annotations

import json
import lzma
from functools import lru_cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "data"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_T = "tokenizer.ggml."


@lru_cache(maxsize=1)
def smollm2() -> dict[str, Any]:
    """All `tokenizer.*` keys of SmolLM2-135M-Instruct.Q4_1.gguf. Its tokens end with what the merges make, in order."""
    metadata: dict[str, Any] = json.loads(lzma.decompress((DATA / "smollm2-vocabulary.json.xz").read_bytes()))
    merges = metadata[_T + "merges"].split("\n")
    tokens = metadata[_T + "tokens"] + [merge.replace(" ", "") for merge in merges]
    types = [CONTROL] * 17 + [NORMAL] * (len(tokens) - 17)
    return metadata | {_T + "tokens": tokens, _T + "merges": merges, _T + "token_type": types}


def byte_level(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary: every byte, a few merges, </s> and <tool>. changes: keys without their prefix."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "1 2", "12 3", "Ġ Ġ", "! Ċ"]
    merged = [merge.replace(" ", "") for merge in merges]
    tokens = ["</s>", "<s>", *_alphabet(), *merged, "<tool>", "[PAD1]", "[PAD2]"]
    types = [CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 5), USER_DEFINED, UNUSED, UNUSED]
    values = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges}
    return {_T + key: value for key, value in (values | {"eos_token_id": 0, "bos_token_id": 1} | changes).items()}


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary: <unk>, <s>, </s>, every byte, letters, and pieces of them by score."""
    letters = ["▁", *"abcdehlorw"]
    pieces = ["ll", "he", "▁w", "hell", "or", "ab", "hello", "▁▁", "▁wor", "▁hello", "bab", "abab", "ld", "▁world"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(pieces) + len(letters))]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces) + len(letters))]
    values = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    return {_T + key: value for key, value in (values | changes).items()}


def _alphabet() -> list[str]:
    """How byte-level vocabularies write the bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + place) for place in range(len(others))]
