"""Where prompts begin alike: keys of a body's beginnings, by its text alone, since the ingress has no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

from forerun.cluster.messages import Prefix

PIECE = 256
"""Characters of a piece: about a page of 64 tokens."""
_MOST_PIECES = 512
"""Beginnings that are looked at; prompts that are alike up to there go to one replica whatever follows."""


def prefix_of(body: object, tenant: str | None, session: str) -> Prefix:
    """How the prompt of a body begins; nothing of one that holds none, which a replica will refuse.

    A chat's messages, and the pieces of a longer text, each end a beginning: a chat that goes on begins with all of
    itself. Prompts of different tenants never begin alike, since they share no pages.

    Args:
        session: the client's name of the conversation; empty if it gave none.
    """
    keys, lengths, length = [], [], 0
    key = blake2b(repr(tenant).encode(), digest_size=8).digest()
    if isinstance(body, Mapping):
        for number, piece in enumerate(_pieces(body)):
            if number == _MOST_PIECES:
                break
            key = blake2b(piece.encode("utf-8", "surrogatepass"), digest_size=8, key=key).digest()
            length += len(piece)
            keys.append(int.from_bytes(key, "big"))
            lengths.append(length)
    return Prefix(tuple(keys), tuple(lengths), f"{tenant} {session}" if session else "")


def _pieces(body: Mapping[str, Any]) -> Iterator[str]:
    for text in _texts(body):
        for start in range(0, max(len(text), 1), PIECE):
            yield text[start : start + PIECE]


def _texts(body: Mapping[str, Any]) -> Iterator[str]:
    """The parts of a prompt in the order in which a template writes them."""
    for name in ("tools", "instructions"):
        if body.get(name):
            yield json.dumps(body[name])
    for name in ("messages", "input", "prompt"):
        value = body.get(name)
        if isinstance(value, str):
            yield value
        elif isinstance(value, list) and value and all(isinstance(each, int) for each in value):
            yield json.dumps(value)
        elif isinstance(value, list) and name == "prompt":
            yield value[0] if value and isinstance(value[0], str) else json.dumps(value[:1])
        elif isinstance(value, list):
            yield from (json.dumps(each) for each in value)
