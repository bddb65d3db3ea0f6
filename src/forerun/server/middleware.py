"""Request middleware: request ids, access, limits of bodies, draining, and the log line of each request."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from contextlib import suppress
from hashlib import sha256
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.errors import EngineClosedError, ForerunError, RequestBodyError, RequestTimeoutError
from forerun.server.logs import LOGGER
from forerun.server.metrics import HTTPMetrics
from forerun.server.options import ServerOptions, host_of, is_loopback
from forerun.server.protocol.errors import error_at, error_response, failure_fields
from forerun.server.protocol.without_effect import IGNORED_HEADER

OPEN_PATHS = ("/health", "/", "/page.css", "/page.js")
"""Paths that need no key."""
STATE_PATHS = ("/live", "/metrics")
"""Paths that tell one tenant about all."""
_MIB = 1 << 20
_LINGER = 2.0
"""Seconds for which the rest of a too large body is read: if closed at once, the client would not see the answer."""
_TWO_LENGTHS = "ambiguous_length"
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_log = logging.getLogger(LOGGER)


def refusal_response(error: BaseException, path: str) -> JSONResponse:
    """Return the response to a failed request at this path."""
    status, body = error_response(error)
    again = {"retry-after": "1"}
    headers = {401: {"www-authenticate": "Bearer"}, 429: again, 503: again}.get(status)
    return JSONResponse(error_at(path, body), status, headers)


class Access:
    """Decides which requests are let in.

    Where there is no API key, a page of another site must not use the server through the browser of its reader. It
    cannot choose `Host`, though its own name may resolve to this machine (DNS rebinding); it cannot hide its `Origin`
    from a server that reads it, nor send JSON without the browser asking first, which only CORS answers.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._keys = [sha256(key.encode()).digest() for key in options.api_key]
        self._state_keys = [] if options.metrics_key is None else [sha256(options.metrics_key.encode()).digest()]
        self._hosts = {options.host.lower(), *map(host_of, options.allowed_host)}

    def tenant(self, scope: Scope) -> str | None:
        """Return the tenant of a request, by its key; None where none is needed.

        Raises:
            RequestBodyError: the request is not let in.
        """
        headers = Headers(scope=scope)
        path = scope["path"]
        if not self._keys:
            self._check_browser(headers, scope["method"])
        of_state = bool(self._state_keys) and path in STATE_PATHS
        keys = self._state_keys if of_state else self._keys
        if not keys or path in OPEN_PATHS:
            return None
        # Anthropic's clients send the key in a header of its own
        scheme, _, given = headers.get("authorization", f"Bearer {headers.get('x-api-key', '')}").partition(" ")
        digest = sha256(given.strip().encode("latin-1")).digest()
        # compare with all keys, each in constant time
        matches = [hmac.compare_digest(digest, key) for key in keys]
        if scheme.lower() != "bearer" or not any(matches):
            name = f"key of {path} (--metrics-key)" if of_state else "API key"
            raise RequestBodyError(
                f"The {name} is missing or wrong. Send it as a header: Authorization: Bearer KEY.",
                code="invalid_api_key",
                status=401,
            )
        if path in STATE_PATHS and not of_state and not is_loopback((scope.get("client") or ("",))[0]):
            raise RequestBodyError(
                f"{path} tells about all tenants, and API keys open it on the server's own machine alone. Start the "
                "server with --metrics-key KEY, and send that key.",
                status=403,
            )
        # not by its place among the keys: prompts may be kept for another start, with others
        return None if of_state else f"key {digest.hex()}"

    def _check_browser(self, headers: Headers, method: str) -> None:
        """Raise RequestBodyError for what a page of another site may have sent."""
        options = self._options
        hosts = headers.getlist("host")
        for host in hosts:
            name = host_of(host)
            if not (is_loopback(name) or name in self._hosts or "*" in options.allowed_host):
                raise RequestBodyError(
                    f"The server has no API key, and Host is {host[:100]!r}, which is no name of this machine that it "
                    f"knows. Start it with --allowed-host {name[:100] or 'NAME'}, or with --api-key.",
                    status=403,
                )
        for origin in headers.getlist("origin"):
            own = origin.partition("://")[2].lower() in map(str.lower, hosts)
            if not (own or origin in options.cors_origin or "*" in options.cors_origin):
                raise RequestBodyError(
                    f"The server has no API key, and pages of {origin[:100]!r} may not call it. Name that origin in "
                    "the key cors_origin of its configuration file, or start it with --api-key.",
                    status=403,
                )
        if method == "POST" and not all(map(_is_json, headers.getlist("content-type") or [""])):
            raise RequestBodyError(
                f"The body's Content-Type is {headers.get('content-type', 'missing')[:100]}, but must be JSON. Add "
                "the header Content-Type: application/json (curl: -H 'Content-Type: application/json').",
                status=415,
            )


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")


class RequestMiddleware:
    """The outermost layer of the application.

    Attributes:
        draining: new requests are refused.
        num_active: requests that have begun and not ended.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions, metrics: HTTPMetrics) -> None:
        self._app = app
        self._options = options
        self._metrics = metrics
        self._access = Access(options)
        self.draining = False
        self.num_active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        started = time.monotonic()
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        log_fields: dict[str, Any] = {}
        status: int | None = None  # of the response that has begun

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                more = [(b"x-request-id", request_id.encode())]
                if ignored := log_fields.get("ignored"):
                    more.append((IGNORED_HEADER.encode(), ", ".join(ignored).encode()))
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        self.num_active += 1
        try:
            scope.setdefault("state", {}).update(log_fields=log_fields, request_id=request_id)
            await self._handle(scope, receive, send_with_id)
        except ClientDisconnect:
            self._metrics.disconnected()
            log_fields["disconnected"] = True
        except Exception as error:
            log_fields |= failure_fields(error) if status is None else {"cut": type(error).__name__}
            if status is None:
                await _refuse(error, scope, receive, send_with_id)
            if not isinstance(error, ForerunError):
                _log.exception("a request failed")
        finally:
            self.num_active -= 1
            self._metrics.responded(status=str(status or 499))
            _log.info(
                {
                    "event": "request",
                    "request_id": request_id,
                    "method": scope["method"],
                    "path": scope["path"][:200],
                    "status": status,
                    "seconds": round(time.monotonic() - started, 4),
                    **log_fields,
                }
            )

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if {"content-length", "transfer-encoding"} <= {*Headers(scope=scope)}:
            raise RequestBodyError(
                "The request has both Content-Length and Transfer-Encoding, so that a proxy may see its end elsewhere. "
                "Send one of them.",
                code=_TWO_LENGTHS,
            )
        scope["state"]["tenant"] = self._access.tenant(scope)
        if scope["method"] == "POST":
            if self.draining:
                raise EngineClosedError("The server is shutting down, and takes no more requests. Send it again later.")
            scope["state"]["body"] = await self._body(Request(scope, receive))
        await self._app(scope, receive, send)

    async def _body(self, request: Request) -> bytes:
        """Read the whole body.

        Raises:
            RequestBodyError: it is too large; checked by its announced length before any of it is read.
            RequestTimeoutError: it is not complete in time.
            ClientDisconnect: the client has gone.
        """
        most = int(self._options.max_body * _MIB)
        too_large = RequestBodyError(
            f"The request's body is larger than {self._options.max_body:g} MiB. Send less, or increase "
            "the key max_body in the server's configuration file.",
            code="request_too_large",
            status=413,
        )
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > most:
            raise too_large
        content = bytearray()
        try:
            async with asyncio.timeout(self._options.body_timeout):
                async for piece in request.stream():
                    content += piece
                    if len(content) > most:
                        raise too_large
        except TimeoutError:
            raise RequestTimeoutError(
                f"The request's body has not come within {self._options.body_timeout:g} seconds. Send it faster."
            ) from None
        return bytes(content)


async def _refuse(error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error. The rest of a too large body is read for a while, for the client to see the answer."""
    answer = refusal_response(error, scope["path"])
    headers = answer.raw_headers
    if answer.status_code in (408, 413) or getattr(error, "code", None) == _TWO_LENGTHS:
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": True})
    if answer.status_code == 413:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER):
                while (await receive()).get("more_body"):
                    pass
    await send({"type": "http.response.body", "body": b""})
