"""The ingress: the request middleware of `forerun serve`, which forwards requests to replicas and streams answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from forerun.errors import ReplicaError, RequestBodyError
from forerun.integrations.ray.affinity import prefix_of
from forerun.integrations.ray.messages import LOG_FIELDS, PROGRESS, ForwardedRequest
from forerun.server.app import with_middleware
from forerun.server.completions import error_events
from forerun.server.metrics import HTTPMetrics
from forerun.server.options import ServerOptions
from forerun.server.progress import StreamState
from forerun.server.service import while_connected

SESSION_HEADER = b"x-session-id"
"""Ray Serve's own name of the header."""
_FORWARDED = (b"content-type", b"accept")
_MOST_REPLICAS = 3
"""Replicas that a request is sent to, one after another as they end: the request may be the cause."""
_STREAMS = (b"text/event-stream", b"application/x-ndjson")
_START_TIMEOUT = 30.0
"""Seconds in which a replica must show that it computes a request; none does while all are restarting."""
_SUMMARY_TIMEOUT = 5.0
"""The same for requests without computation, such as health checks."""


class Ingress:
    """The application in front of the replicas.

    Args:
        replicas: `application.RayReplicas`.
        metrics_at: returns the URLs of the replicas' metrics.

    Attributes:
        app: the application with its middleware.
        middleware: counts the active requests.
    """

    def __init__(
        self, replicas: Any, options: ServerOptions, metrics: HTTPMetrics, metrics_at: Callable[[], str]
    ) -> None:
        self._replicas = replicas
        self._metrics_at = metrics_at
        self.app, self.middleware = with_middleware(self._handle, options, metrics)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request behind the middleware, which answers exceptions raised before an answer has begun."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            request = Request(scope, receive)
            if scope["method"] == "GET" and scope["path"] in ("/health", "/live", "/metrics"):
                await JSONResponse(*await self._summary(scope["path"]))(scope, receive, send)
                return
            forwarded = await _forwarded(request)
            relay = _Relay(self._replicas, forwarded, send, scope["state"]["log_fields"])
            await while_connected(request, relay.run(_START_TIMEOUT if scope["method"] == "POST" else _SUMMARY_TIMEOUT))

    async def _summary(self, path: str) -> tuple[Any, int]:
        """Answer /health, /live and /metrics for all replicas together."""
        if path == "/metrics":
            raise RequestBodyError(
                f"Replicas on Ray export their metrics by Ray, on each node: {self._metrics_at()}.",
                status=404,
            )
        if path == "/health" and self.middleware.draining:
            return {"status": "draining"}, 503
        found = await self._replicas.live()
        if not found:
            raise ReplicaError("No replica is running. Send it again later.")
        if path == "/health":
            return {"status": "ok", "replicas": len(found), "cannot": found[0]["cannot"]}, 200
        return _combined([each["live"] for each in found]), 200


@dataclass(slots=True)
class _Relay:
    """One request, sent to a replica, and its answer, sent to the client.

    Attributes:
        finished: the last event of the stream has been sent.
        complete: the answer is.
    """

    replicas: Any
    request: ForwardedRequest
    send: Send
    log_fields: dict[str, Any]
    head: Message | None = None
    begun: bool = False
    streams: bool = False
    finished: bool = False
    complete: bool = False

    async def run(self, start_timeout: float) -> None:
        """Forward the whole answer: where a replica ends, another one goes on.

        Raises:
            Exception: the request failed before any part of the answer was forwarded.
        """
        for left in reversed(range(_MOST_REPLICAS)):
            try:
                await self._attempt(start_timeout)
                return
            except TimeoutError:
                failure: Exception = ReplicaError(
                    f"No replica has taken the request within {start_timeout:g} seconds. Send it again later."
                )
                break
            except Exception as error:
                failure = error
                if self.finished or self.complete or not (left and isinstance(error, ReplicaError)):
                    break
                self.log_fields["lost_replicas"] = _MOST_REPLICAS - left
        if not (self.begun and self.streams) or self.complete:
            raise failure
        body = b""
        if not self.finished:
            self.log_fields["error"] = type(failure).__name__
            body = error_events(self.request.path, failure, self.request.stream.num_events)
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def _attempt(self, start_timeout: float) -> None:
        """Forward the rest of the answer from one replica.

        Raises:
            TimeoutError: none has taken the request.
            ReplicaError: it has ended before.
        """
        async with aclosing(self.replicas.answer(self.request)) as messages:
            async with asyncio.timeout(start_timeout):
                await self._forward(await anext(messages))
            async for batch in messages:
                await self._forward(batch)
        if not self.complete:
            raise ReplicaError("The replica has ended before its answer was complete. Send the request again.")

    async def _forward(self, messages: list[Message]) -> None:
        for message in messages:
            kind = message["type"]
            if kind == LOG_FIELDS:
                self.log_fields.update(message["fields"])
            elif kind == "http.response.start":
                if self.begun and message["status"] != 200:
                    raise ReplicaError(
                        f"The replica that computed the stream has ended, and another one has refused the rest with "
                        f"status {message['status']}. Send the request again."
                    )
                self.head = message  # held back until there is a body, so that a failure until then has its own status
                self.streams = dict(message["headers"]).get(b"content-type", b"").startswith(_STREAMS)
            else:
                if not self.begun:
                    assert self.head is not None
                    self.begun = True
                    await self.send(self.head)
                if self.streams and PROGRESS in message:
                    progress = message.pop(PROGRESS)
                    self.finished = progress is None
                    if progress is not None:
                        self.request.stream.advance(*progress)
                self.complete = not message.get("more_body", False)
                await self.send(message)


async def _forwarded(request: Request) -> ForwardedRequest:
    content = request.state.body if request.method == "POST" else b""
    given = request.headers.raw
    session = next((value.decode("latin-1") for name, value in given if name == SESSION_HEADER), "")
    tenant = request.state.tenant
    return ForwardedRequest(
        method=request.method,
        path=request.scope["path"],
        query=request.scope["query_string"],
        headers=tuple((name, value) for name, value in given if name in _FORWARDED),
        body=content,
        request_id=request.state.request_id,
        tenant=tenant,
        prefix=prefix_of(await asyncio.to_thread(_value, content), tenant, session),
        stream=StreamState(),
    )


def _value(content: bytes) -> Any:
    """Return the value of a body; None for an invalid one, which a replica will refuse."""
    try:
        return from_json(content)
    except ValueError:
        return None


def _combined(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the states of batch engines: counts are added, all else is that of the busiest engine."""
    busiest = max(states, key=lambda state: state["running"])
    counts = {name: sum(state[name] for state in states) for name, count in busiest.items() if isinstance(count, int)}
    return {**busiest, **counts, "replicas": len(states)}


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
