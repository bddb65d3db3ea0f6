"""Prefix affinity: route a request to the replica that has computed most of its prompt, unless it is much busier."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from forerun.integrations.ray.messages import Prefix

PIECE = 256
"""Characters per piece: about a page of 64 tokens."""
_MOST_PIECES = 512
"""Maximum number of prefixes of a prompt; prompts with the same longest prefix go to the same replica."""


def prefix_of(body: object, tenant: str | None, session: str) -> Prefix:
    """Hash the prefixes of a body's prompt, by its text, since the ingress has no tokenizer; none without a prompt.

    A prefix ends after each message of a chat, and after each piece of a longer text, so a continued chat has all
    prefixes of its beginning. Prompts of different tenants have no common prefix, since they share no pages.

    Args:
        session: name of the conversation by the client; empty without one.
    """
    keys = []
    lengths = []
    length = 0
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
    """Yield the parts of a prompt in the order of chat templates."""
    for name in ("tools", "instructions", "system"):
        if body.get(name):
            yield json.dumps(body[name])
    for name in ("messages", "input", "input_extra", "input_prefix", "prompt"):
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
"""Maximum number of remembered prefixes; the least recently used one is dropped first."""


class Affinity(Generic[R]):
    """Remembers which prefixes each replica has computed.

    Args:
        slack: a replica may have this many requests more than the least busy one, and still get requests with its
            prefixes.
        most: maximum number of remembered prefixes.
    """

    def __init__(self, slack: int, most: int = _MOST_KEYS) -> None:
        self._slack = slack
        self._most = most
        self._holders: OrderedDict[Hashable, set[R]] = OrderedDict()
        self._num_sent: dict[R, int] = {}

    def ranked(self, prefix: Prefix, queues: Mapping[R, int]) -> list[list[R]]:
        """Return the replicas in ranks, the best first.

        A session's replica comes first regardless of its queue. A prefix counts from a page of tokens on.

        Args:
            queues: number of requests of each replica.
        """
        by_load = sorted(queues, key=lambda each: (queues[each], self._num_sent.get(each, 0)))
        if not by_load:
            return []
        held = [each for each in by_load if each in self._holders.get(_session(prefix), ())]
        if not held:
            busiest = queues[by_load[0]] + self._slack
            matched = {each: length for each in by_load if (length := self._matched(prefix, each)) >= PIECE}
            longest = max(matched.values(), default=0)
            held = [each for each in by_load if matched.get(each) == longest and queues[each] <= busiest]
        return [[each] for each in dict.fromkeys((*held, *by_load))]

    def sent(self, prefix: Prefix, replica: R) -> None:
        """Record that a request with this prefix was sent to this replica."""
        self._num_sent[replica] = self._num_sent.get(replica, 0) + 1
        if prefix.session:
            self._holders[_session(prefix)] = {replica}  # moved, if its former replica was full or is gone
        for key in prefix.keys:
            self._holders.setdefault(key, set()).add(replica)
        for used in (*reversed(prefix.keys), _session(prefix)):  # the shortest prefixes are the most recently used
            if used in self._holders:
                self._holders.move_to_end(used)
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def keep(self, replicas: Mapping[R, object]) -> None:
        """Forget all other replicas."""
        self._num_sent = {each: count for each, count in self._num_sent.items() if each in replicas}
        for key, holders in [*self._holders.items()]:
            holders.intersection_update(replicas)
            if not holders:
                del self._holders[key]

    def _matched(self, prefix: Prefix, replica: R) -> int:
        """Return the characters of the longest prefix that this replica has computed."""
        matched = 0
        for key, length in zip(prefix.keys, prefix.lengths, strict=True):
            if replica not in self._holders.get(key, ()):
                break
            matched = length
        return matched


def _session(prefix: Prefix) -> Hashable:
    return ("session", prefix.session) if prefix.session else None
