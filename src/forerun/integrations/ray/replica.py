"""A replica: an engine behind the routes of `forerun serve`, which are called without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message

from forerun.integrations.ray.messages import LOG_FIELDS, PROGRESS, ForwardedRequest
from forerun.server.app import make_app
from forerun.server.service import Service

_KEEP_ALIVE_AFTER = 5.0
"""Seconds without an answer after which a replica shows that it computes the request."""
_ABORT_TIMEOUT = 1.0
"""Seconds in which an abandoned request may end by itself."""
_EVENT = (b"data:", b"event:", b"{")


class Replica:
    """Answers forwarded requests.

    Args:
        name: of this replica, for the log.
    """

    def __init__(self, service: Service, name: str) -> None:
        self._service = service
        self._name = name
        self._app: ASGIApp = make_app(service, lambda: False)

    async def answer(self, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        """Yield the messages of the application in lists of all that are ready. Closing the generator ends the request.

        If there is no message for a while, an empty list comes first, as a sign that the request is being computed.
        """
        outbox: asyncio.Queue[Message | None] = asyncio.Queue()
        disconnected = asyncio.Event()
        log_fields: dict[str, Any] = {"replica": self._name}
        task = asyncio.create_task(self._run(request, log_fields, outbox, disconnected))
        keep_alive = asyncio.get_running_loop().call_later(_KEEP_ALIVE_AFTER, outbox.put_nowait, {})
        try:
            ended = False
            while not ended:
                batch = [await outbox.get()]
                keep_alive.cancel()
                while not outbox.empty():
                    batch.append(outbox.get_nowait())
                ended = None in batch
                messages = [message for message in batch if message]
                yield [*messages, {"type": LOG_FIELDS, "fields": log_fields}] if ended else messages
            await task
        finally:
            keep_alive.cancel()
            disconnected.set()
            try:
                await asyncio.wait((task,), timeout=_ABORT_TIMEOUT)
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    async def state(self) -> dict[str, Any]:
        """Return the state of the engine, and what the server cannot do."""
        return {"live": self._service.live(), "cannot": dict(self._service.limits())}

    def check_health(self) -> None:
        """Raise DeviceError if the device has failed: Ray then replaces this replica."""
        self._service.llm.engine.faults.check()

    def close(self) -> None:
        """Abort all requests."""
        self._service.close()

    async def _run(
        self,
        request: ForwardedRequest,
        log_fields: dict[str, Any],
        outbox: asyncio.Queue[Message | None],
        disconnected: asyncio.Event,
    ) -> None:
        """Call the application with the request; put its messages and then None into the outbox."""
        state: dict[str, Any] = {"log_fields": log_fields, "request_id": request.request_id}
        state |= {"tenant": request.tenant, "stream": request.stream, "body": request.body}

        async def receive() -> Message:
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message.get("body", b"").startswith(_EVENT):  # not a ping, which may come before them
                message[PROGRESS] = state.pop("progress", None)
            outbox.put_nowait(message)

        try:
            await self._app(_scope(request, state), receive, send)
        finally:
            outbox.put_nowait(None)


def _scope(request: ForwardedRequest, state: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "root_path": "",
        "query_string": request.query,
        "headers": [*request.headers],
        "client": None,
        "server": None,
        "state": state,
    }
