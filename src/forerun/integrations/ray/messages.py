"""Messages between ingress and replicas. A router sees only the first argument of a request."""

from __future__ import annotations

from typing import NamedTuple

from forerun.server.progress import StreamState

LOG_FIELDS = "forerun.log_fields"
"""The type of the last message of an answer: its `fields` are added to the log line of the request."""
PROGRESS = "forerun.progress"
"""The key of a stream's events in their message: what `StreamState.advance` takes; None with the last ones."""


class Prefix(NamedTuple):
    """The prefixes of a prompt.

    Attributes:
        keys: hashes of its prefixes, the shortest first: prompts with a common prefix have a common key.
        lengths: characters of each prefix.
        session: name of the conversation by the client.
    """

    keys: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    session: str = ""


class ForwardedRequest(NamedTuple):
    """A request that has passed the request middleware.

    Attributes:
        tenant: owner of the request, by its key.
        stream: what other replicas, which have ended, have sent of the answer.
    """

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    request_id: str
    tenant: str | None
    prefix: Prefix
    stream: StreamState
