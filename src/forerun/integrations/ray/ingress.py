"""The ingress: what `forerun serve` does before a request is read, and a replica's answer passed on as it comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from forerun.errors import ReplicaError, RequestBodyError
from forerun.integrations.ray.affinity import prefix_of
from forerun.integrations.ray.messages import TOLD, ForwardedRequest
from forerun.server.app import gated
from forerun.server.completions import while_connected
from forerun.server.metrics import HTTPMetrics
from forerun.server.middleware import App, Message, Receive, RequestMiddleware, Scope, Send
from forerun.server.options import ServerOptions
from forerun.server.protocol.errors import error_response
from forerun.server.protocol.responses_api import RESPONSES_URL
from forerun.server.service import parsed_body

SESSION_HEADER = b"x-session-id"
"""Ray Serve's own name of the header too."""
_FORWARDED = (b"content-type", b"accept")
_TAKEN_WITHIN = 30.0
"""Seconds in which a replica must give a sign that it computes a request; while all are starting anew, none does."""
_FACT_WITHIN = 5.0
"""The same for what asks no engine: whoever probes the health of a server waits no longer."""


class Ingress:
    """The application in front of the replicas.

    Args:
        replicas: `application.RayReplicas`.
        metrics_at: tells where the replicas' metrics are to be had.

    Attributes:
        app: what is to be called: the gate and what is behind it.
        gate: with the account of requests under way.
    """

    def __init__(
        self, replicas: Any, options: ServerOptions, metrics: HTTPMetrics, metrics_at: Callable[[], str]
    ) -> None:
        self._replicas, self._metrics_at = replicas, metrics_at
        self.app: App
        self.gate: RequestMiddleware
        self.app, self.gate = gated(self._passed, options, metrics)

    async def _passed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request behind the gate. What is raised before an answer has begun is answered there."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            request = Request(scope, receive)
            if scope["method"] == "GET" and scope["path"] in ("/health", "/live", "/metrics"):
                await JSONResponse(*await self._fact(scope["path"]))(scope, receive, send)
                return
            asked = await _asked(request)
            relay = _Relay(self._replicas, asked, send, scope["state"]["told"])
            await while_connected(request, relay.run(_TAKEN_WITHIN if scope["method"] == "POST" else _FACT_WITHIN))

    async def _fact(self, path: str) -> tuple[Any, int]:
        """What is told of all replicas together."""
        if path == "/metrics":
            raise RequestBodyError(
                f"Replicas on Ray give their metrics to Ray, which tells them on each node: {self._metrics_at()}.",
                status=404,
            )
        if path == "/health" and self.gate.draining:
            return {"status": "draining"}, 503
        found = await self._replicas.live()
        if not found:
            raise ReplicaError("No replica is there. Send it again later.")
        if path == "/health":
            return {"status": "ok", "replicas": len(found), "cannot": found[0]["cannot"]}, 200
        return _together([each["live"] for each in found]), 200


@dataclass(slots=True)
class _Relay:
    """One request, passed to a replica, and its answer, passed back."""

    replicas: Any
    asked: ForwardedRequest
    send: Send
    told: dict[str, Any]
    head: Message | None = None
    begun: bool = False
    streams: bool = False
    num_events: int = 0
    complete: bool = False

    async def run(self, taken_within: float) -> None:
        """Pass on all of it.

        Raises:
            Exception: it failed before anything of it was passed on.
        """
        try:
            async with aclosing(self.replicas.answer(self.asked)) as messages:
                try:
                    async with asyncio.timeout(taken_within):
                        await self._pass_on(await anext(messages))
                except TimeoutError:
                    raise ReplicaError(
                        f"No replica has taken the request within {taken_within:g} seconds. Send it again later."
                    ) from None
                async for several in messages:
                    await self._pass_on(several)
            if not self.complete:
                raise ReplicaError("The replica has ended before its answer was whole. Send the request again.")
        except Exception as error:
            if not (self.begun and self.streams) or self.complete:
                raise
            self.told["error"] = type(error).__name__
            body = self._last_event(error)
            await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def _pass_on(self, messages: list[Message]) -> None:
        for message in messages:
            kind = message["type"]
            if kind == TOLD:
                self.told.update(message["told"])
            elif kind == "http.response.start":
                self.head = message  # held back until there is a body: until then, a failure has a status of its own
                self.streams = dict(message["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")
            else:
                if not self.begun:
                    assert self.head is not None
                    self.begun = True
                    await self.send(self.head)
                body = message.get("body", b"")
                self.num_events += body.startswith((b"event:", b"data:"))
                self.complete = not message.get("more_body", False)
                await self.send(message)

    def _last_event(self, error: Exception) -> bytes:
        """The event that ends a stream with an error, in place of those that it lacks."""
        body = error_response(error)[1]
        if self.asked.path != RESPONSES_URL:
            return b"data: " + _compact(body) + b"\n\n"
        told = body["error"]
        event = {"type": "error", "sequence_number": self.num_events}
        event |= {name: told[name] for name in ("code", "message", "param")}
        return b"event: error\ndata: " + _compact(event) + b"\n\n"


async def _asked(request: Request) -> ForwardedRequest:
    content = await request.body() if request.method == "POST" else b""
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
        prefix=prefix_of(await _parsed(content), tenant, session),
    )


async def _parsed(content: bytes) -> Any:
    """The body as far as it is JSON; a replica says what is wrong with one that is not."""
    if not content:
        return None
    try:
        return await parsed_body(content)
    except RequestBodyError:
        return None


def _together(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of several engines as one: counts are added, and the step is the busiest engine's."""
    busiest = max(states, key=lambda state: state["running"])
    counts = {name: sum(state[name] for state in states) for name in ("running", "waiting", "max_batch")}
    return {**counts, "last_step": busiest["last_step"], "replicas": len(states)}


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


def _compact(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
