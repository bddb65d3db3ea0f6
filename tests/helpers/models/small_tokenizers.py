"""Small tokenizers of the two usual kinds, without files: byte-level ones, and such as SentencePiece makes."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ("hello", "world", "wor", "ld", "!", "a")
END = "</s>"
"""The end of text, a special token that the tokenizer names."""
TURN = "<|im_end|>"
"""A special token that it does not name."""


def byte_level() -> Any:
    """Every byte, some words, and tokens that begin and end inside characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*WORDS, *(" " + word for word in WORDS), "\ufffd"]
    pieces = [*(text.encode() for text in texts), b" \xe2\x82", b"\xac\xf0", b"\x9f\x98", b"\x82\xe2", b"\x80a"]
    written = [*alphabet, *("".join(_character(byte) for byte in piece) for piece in pieces)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(written)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _finished(tokenizer)


def sentence_piece(decoder: str = "llama") -> Any:
    """Words that carry their space, single characters, and every byte. decoder: "llama" or "metaspace"."""
    words = [*WORDS, *("\u2581" + word for word in WORDS), "\u2581", "\u2581\u2581", "é", "\ufffd"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    space: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if decoder == "llama":
        tokenizer.decoder = decoders.Sequence([*space, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _finished(tokenizer)


def ids_of(tokenizer: Any, *tokens: str) -> list[int]:
    """The ids of tokens as they are written in the vocabulary."""
    ids: list[int] = tokenizer.convert_tokens_to_ids(list(tokens))
    return ids


def bytes_of(tokenizer: Any, text: str | bytes) -> list[int]:
    """The ids of the tokens that stand for single bytes."""
    data = text.encode() if isinstance(text, str) else text
    single = tokenizer.convert_tokens_to_ids("<0x41>") not in (None, tokenizer.unk_token_id)
    return ids_of(tokenizer, *(f"<0x{byte:02X}>" if single else _character(byte) for byte in data))


def decoded(tokenizer: Any, ids: Seq[int]) -> str:
    """All of it at once."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def _finished(tokenizer: Tokenizer) -> Any:
    tokenizer.add_special_tokens([AddedToken(END, special=True), AddedToken(TURN, special=True)])
    tokenizer.add_tokens([AddedToken("<tool>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def _character(byte: int) -> str:
    """How byte-level vocabularies write a byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [other for other in range(256) if other not in printable].index(byte))
