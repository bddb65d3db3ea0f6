"""What the tokens of a tokenizer stand for, in bytes, so that two vocabularies can be compared."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from forerun.vocabulary.tokenizer import added_tokens, backend

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """Id -> the bytes that the token adds to a text. Special tokens are left out: they stand for no text.

    Byte-level vocabularies (GPT-2 and its descendants) write each byte as a printable character; SentencePiece
    vocabularies write a space as U+2581 and single bytes as <0x0A>.
    """
    special = set(tokenizer.all_special_ids)
    added = added_tokens(tokenizer)
    byte_level = _is_byte_level(tokenizer)
    table: dict[int, bytes] = {}
    for token, index in tokenizer.get_vocab().items():
        if index in special:
            continue
        if index in added:
            table[index] = added[index].encode("utf-8")
        elif byte_level:
            data = _from_byte_level(token)
            if data is not None:
                table[index] = data
        else:
            match = _BYTE_TOKEN.fullmatch(token)
            table[index] = bytes([int(match[1], 16)]) if match else token.replace(_SPACE_MARK, " ").encode("utf-8")
    return table


def shared_tokens(target: dict[int, bytes], draft: dict[int, bytes]) -> dict[int, int]:
    """Draft id -> target id of the tokens that add the same bytes. One to one: of several the lowest id counts."""
    of_target: dict[bytes, int] = {}
    for index in sorted(target):
        of_target.setdefault(target[index], index)
    shared: dict[int, int] = {}
    taken: set[int] = set()
    for index in sorted(draft):
        same = of_target.get(draft[index])
        if same is not None and same not in taken and draft[index]:
            shared[index] = same
            taken.add(same)
    return shared


def _is_byte_level(tokenizer: Any) -> bool:
    parts = backend(tokenizer)
    if parts:
        return "ByteLevel" in json.dumps([parts.get("decoder"), parts.get("pre_tokenizer")])
    return any(token.startswith("\u0120") for token in tokenizer.get_vocab())


def _from_byte_level(token: str) -> bytes | None:
    table = _byte_of_character()
    try:
        return bytes(table[character] for character in token)
    except KeyError:
        return None  # not written in this alphabet: padding, most likely


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return table
