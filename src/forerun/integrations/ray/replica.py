"""A replica: an engine, and the paths of `forerun serve` in front of it, called without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from forerun.integrations.ray.messages import TOLD, ForwardedRequest
from forerun.server.app import make_app
from forerun.server.middleware import App, Message
from forerun.server.service import Service

_SIGN_AFTER = 5.0
"""Seconds without an answer after which a replica says that it is there."""
_LEAVES_WITHIN = 1.0
"""Seconds that a request has to end by itself when nobody waits for it any more."""


class Replica:
    """Answers requests.

    Args:
        name: of this replica, for the log.
    """

    def __init__(self, service: Service, name: str) -> None:
        self._service, self._name = service, name
        self._app: App = make_app(service, lambda: False)

    async def answer(self, asked: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        """The answer, as the application sends it: all that is there at a time. To close it ends the request.

        Where nothing is there for a while, nothing is given first, as a sign that the request is computed here.
        """
        outbox: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        told: dict[str, Any] = {"replica": self._name}
        task = asyncio.create_task(self._run(asked, told, outbox, gone))
        sign = asyncio.get_running_loop().call_later(_SIGN_AFTER, outbox.put_nowait, {})
        try:
            ended = False
            while not ended:
                several = [await outbox.get()]
                sign.cancel()
                while not outbox.empty():
                    several.append(outbox.get_nowait())
                ended = None in several
                messages = [message for message in several if message]
                yield [*messages, {"type": TOLD, "told": told}] if ended else messages
            await task
        finally:
            sign.cancel()
            gone.set()
            try:
                await asyncio.wait((task,), timeout=_LEAVES_WITHIN)
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    async def state(self) -> dict[str, Any]:
        """What the engine does now, and what the server cannot do."""
        return {"live": self._service.live(), "cannot": dict(self._service.limits())}

    def check_health(self) -> None:
        """Raise DeviceError if nothing can be computed here any more: Ray starts another replica in place of this."""
        self._service.llm.engine.faults.check()

    def close(self) -> None:
        """End what is being computed."""
        self._service.close()

    async def _run(
        self, asked: ForwardedRequest, told: dict[str, Any], outbox: asyncio.Queue[Message | None], gone: asyncio.Event
    ) -> None:
        """Call the application; None is the last that comes into the outbox."""
        body: list[Message] = [{"type": "http.request", "body": asked.body, "more_body": False}]

        async def receive() -> Message:
            if body:
                return body.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            outbox.put_nowait(message)

        try:
            await self._app(_scope(asked, told), receive, send)
        finally:
            outbox.put_nowait(None)


def _scope(asked: ForwardedRequest, told: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "path": asked.path,
        "raw_path": asked.path.encode(),
        "root_path": "",
        "query_string": asked.query,
        "headers": [*asked.headers],
        "client": None,
        "server": None,
        "state": {"told": told, "request_id": asked.request_id, "tenant": asked.tenant},
    }
