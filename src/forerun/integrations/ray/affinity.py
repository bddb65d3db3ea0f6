"""Which replica a request goes to: the one that has computed most of its prompt, unless that one is much busier."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from forerun.integrations.ray.messages import Prefix

# Where prompts begin alike: keys of a body's beginnings, by its text alone, since the ingress has no tokenizer.

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


R = TypeVar("R", bound=Hashable)
_MOST_KEYS = 1 << 17
"""Beginnings that are remembered; the one that was used least recently goes first."""


class Affinity(Generic[R]):
    """What was sent to which replica, as far as it is remembered.

    Args:
        slack: a replica may have so many requests more than the one with the fewest, and still get those that begin
            like others of its own.
        most: beginnings that are remembered.
    """

    def __init__(self, slack: int, most: int = _MOST_KEYS) -> None:
        self._slack, self._most = slack, most
        self._holders: OrderedDict[Hashable, set[R]] = OrderedDict()
        self._num_sent: dict[R, int] = {}

    def ranked(self, prefix: Prefix, queues: Mapping[R, int]) -> list[list[R]]:
        """The replicas, the best first: those of one rank are equally good but for their queues.

        A session's replica comes first whatever its queue. A beginning counts from a page of tokens on.

        Args:
            queues: requests that each replica has.
        """
        others = sorted(queues, key=lambda each: (queues[each], self._num_sent.get(each, 0)))
        if not others:
            return []
        held = [each for each in others if each in self._holders.get(_session(prefix), ())]
        if not held:
            busiest = queues[others[0]] + self._slack
            matched = {each: length for each in others if (length := self._matched(prefix, each)) >= PIECE}
            longest = max(matched.values(), default=0)
            held = [each for each in others if matched.get(each) == longest and queues[each] <= busiest]
        rest = [each for each in others if each not in held]
        return [[each] for each in (*held, *rest)]

    def sent(self, prefix: Prefix, replica: R) -> None:
        """A request with this beginning has gone to this replica."""
        self._num_sent[replica] = self._num_sent.get(replica, 0) + 1
        if prefix.session:
            self._holders[_session(prefix)] = {replica}  # moved, if its former replica was full or is gone
        for key in prefix.keys:
            self._holders.setdefault(key, set()).add(replica)
        for used in (*reversed(prefix.keys), _session(prefix)):  # the shortest beginnings are used last
            if used in self._holders:
                self._holders.move_to_end(used)
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def keep(self, replicas: Mapping[R, object]) -> None:
        """Forget all other replicas."""
        gone = self._num_sent.keys() - replicas.keys()
        if not gone:
            return
        for replica in gone:
            del self._num_sent[replica]
        for each, holders in [*self._holders.items()]:
            holders -= gone
            if not holders:
                del self._holders[each]

    def _matched(self, prefix: Prefix, replica: R) -> int:
        """Characters of the longest beginning that this replica has had."""
        matched = 0
        for key, length in zip(prefix.keys, prefix.lengths, strict=True):
            if replica not in self._holders.get(key, ()):
                break
            matched = length
        return matched


def _session(prefix: Prefix) -> Hashable:
    return ("session", prefix.session) if prefix.session else None
