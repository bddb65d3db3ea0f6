"""What ingress and replicas say to each other. The request's first argument is also all that a router sees of it."""

from __future__ import annotations

from typing import NamedTuple

TOLD = "forerun.told"
"""The type of the last message of an answer: its `told` is what the log line of the request is to tell."""


class Prefix(NamedTuple):
    """How a prompt begins.

    Attributes:
        keys: of its beginnings, the shortest first: two prompts have a key in common if they begin alike up to there.
        lengths: characters of each of these beginnings.
        session: the client's name of the conversation.
    """

    keys: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    session: str = ""


class ForwardedRequest(NamedTuple):
    """A request that has passed the gate.

    Attributes:
        tenant: whose it is, by its key.
    """

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    request_id: str
    tenant: str | None
    prefix: Prefix
