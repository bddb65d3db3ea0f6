"""What ingress and replicas say to each other. The request's first argument is also all that a router sees of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, MutableMapping
from typing import Any, NamedTuple, Protocol, TypeAlias

Message: TypeAlias = MutableMapping[str, Any]
"""Of ASGI, as an application sends it; the last one of an answer is of the type `TOLD`."""

TOLD = "forerun.told"
"""`told` is what the log line of the request is to tell."""


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


class Asked(NamedTuple):
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


class Replicas(Protocol):
    """The replicas of a model, as the ingress sees them."""

    def answer(self, asked: Asked) -> AsyncGenerator[list[Message], None]:
        """What one of them answers, as it comes; perhaps nothing at first. To close it ends the request.

        Raises:
            ReplicaError: it has ended, or there is none.
            QueueFullError: all are busy, and too many wait.
        """

    async def live(self) -> list[dict[str, Any]]:
        """What the engine of each does now; those that do not answer are left out."""
