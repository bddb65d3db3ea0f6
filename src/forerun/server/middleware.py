"""What every request passes before it is read: its id, the key, the limits of its body, the drain; and its log line."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from hashlib import sha256
from typing import Any, TypeAlias

from forerun.errors import EngineClosedError, ForerunError, RequestBodyError, RequestTimeoutError
from forerun.server.body_inspector import LARGE_BODY
from forerun.server.logs import LOGGER
from forerun.server.metrics import HTTPMetrics
from forerun.server.options import ServerOptions
from forerun.server.protocol.errors import error_response

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/health", "/", "/page.css", "/page.js")
"""Need no key."""
_MIB = 1 << 20
_LINGER = 2.0
"""Seconds for which the rest of a body that is too large is read: closed at once, a client would see no answer."""
_PACE = 32.0 * _MIB
"""Bytes a second of large bodies, all of them together: what reads them takes turns with what drives the engine."""
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_log = logging.getLogger(LOGGER)


class ClientGoneError(Exception):
    """The client has left; nobody is told."""


class Pace:
    """Lets at most so many bytes a second pass.

    rate: bytes a second.
    """

    def __init__(self, rate: float) -> None:
        self._rate, self._free = rate, 0.0

    def take(self, size: int) -> float:
        """Seconds to wait, until what was let pass before, and this, would have passed."""
        now = time.monotonic()
        self._free = max(self._free, now) + size / self._rate
        return self._free - now


class RequestMiddleware:
    """The outermost part of the application.

    Attributes:
        draining: new requests are refused.
        num_active: requests that have been let in and not ended.
    """

    def __init__(self, app: App, options: ServerOptions, metrics: HTTPMetrics) -> None:
        self._app, self._options, self._metrics = app, options, metrics
        self._keys = [sha256(key.encode()).digest() for key in options.api_key]
        self._pace = Pace(_PACE)
        self.draining = False
        self.num_active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        passage = _Passage(scope, send)
        self.num_active += 1
        try:
            await self._pass(scope, receive, passage)
        except ClientGoneError:
            self._metrics.disconnected()
            passage.told["disconnected"] = True
        except Exception as error:
            if passage.status is None:
                await passage.refuse(error, receive)
            else:
                passage.told["cut"] = type(error).__name__
            if not isinstance(error, ForerunError):
                _log.exception("a request failed")
        finally:
            self.num_active -= 1
            self._metrics.responded(passage.status or 499)
            _log.info(passage.line())

    async def _pass(self, scope: Scope, receive: Receive, passage: _Passage) -> None:
        scope.setdefault("state", {})["told"] = passage.told
        scope["state"]["request_id"] = passage.request_id
        headers = {name: value for name, value in scope["headers"] if name in (b"authorization", b"content-length")}
        scope["state"]["tenant"] = self._tenant(scope["path"], headers.get(b"authorization", b""))
        if scope["method"] == "POST":
            if self.draining:
                raise EngineClosedError("The server is about to end, and takes no more requests. Send it again later.")
            body = await self._body(receive, headers.get(b"content-length", b""))
            receive = _replayed(body, receive)
        await self._app(scope, receive, passage.send)

    def _tenant(self, path: str, authorization: bytes) -> str | None:
        """Whose request it is, by its key; None where there are no keys.

        Raises:
            RequestBodyError: the key is missing or wrong.
        """
        if not self._keys or path in OPEN_PATHS:
            return None
        scheme, _, given = authorization.partition(b" ")
        digest = sha256(given.strip()).digest()
        # all are compared, each in constant time
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise RequestBodyError(
                "The API key is missing or wrong. Send it as a header: Authorization: Bearer KEY.",
                code="invalid_api_key",
                status=401,
            )
        return f"key {matches.index(True)}"

    async def _body(self, receive: Receive, length: bytes) -> bytes:
        """The whole body.

        Raises:
            RequestBodyError: it is too large; told by its announced length before any of it is read.
            RequestTimeoutError: it does not come.
            ClientGoneError: nor the client.
        """
        most = int(self._options.max_body * _MIB)
        too_large = RequestBodyError(
            f"The request's body is larger than {self._options.max_body:g} MiB. Send less, or let the server's "
            "--max-body allow more.",
            code="request_too_large",
            status=413,
        )
        if length.isdigit() and int(length[:20]) > most:
            raise too_large
        pieces, size, more = [], 0, True
        try:
            async with asyncio.timeout(self._options.body_timeout) as limit:
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    more = message.get("more_body", False)
                    if size > most:
                        raise too_large
                    if more and size > LARGE_BODY:
                        seconds = self._pace.take(len(pieces[-1]))
                        limit.reschedule((limit.when() or 0.0) + seconds)  # the client is not to blame for these
                        await asyncio.sleep(seconds)
        except TimeoutError:
            raise RequestTimeoutError(
                f"The request's body has not come within {self._options.body_timeout:g} seconds. Send it faster."
            ) from None
        return b"".join(pieces)


class _Passage:
    """One request on its way.

    Attributes:
        status: of the response; None while it has not begun.
        told: what its log line tells beside the usual.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._started = time.monotonic()
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
        self.request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        self.status: int | None = None
        self.told: dict[str, Any] = {}

    async def send(self, message: Message) -> None:
        """To the client, with the request's id among the headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message["headers"], (b"x-request-id", self.request_id.encode())]}
        await self._send(message)

    async def refuse(self, error: Exception, receive: Receive) -> None:
        """Answer with an error. A body that is too large is thrown away for a while, so that the client reads why."""
        status, body = error_response(error)
        content = json.dumps(body).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        if status in (408, 413):
            headers.append((b"connection", b"close"))  # the rest of the body is not read
        again = [(b"retry-after", b"1")]
        headers += {401: [(b"www-authenticate", b"Bearer")], 429: again, 503: again}.get(status, [])
        self.told["error"] = type(error).__name__
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": content, "more_body": True})
        if status == 413:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LINGER):
                    while (await receive()).get("more_body"):
                        pass
        await self.send({"type": "http.response.body", "body": b""})

    def line(self) -> dict[str, Any]:
        """What the log tells of it."""
        return {
            "event": "request",
            "request_id": self.request_id,
            "method": self._scope["method"],
            "path": self._scope["path"][:200],
            "status": self.status,
            "seconds": round(time.monotonic() - self._started, 4),
            **self.told,
        }


def _replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` of an application that reads the body as if it came now."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
