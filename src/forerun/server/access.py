"""Who may call the server: API keys, the key of figures, and, without keys, what pages of other sites cannot send."""

from __future__ import annotations

import hmac
from collections.abc import MutableMapping
from hashlib import sha256
from typing import Any

from starlette.datastructures import Headers

from forerun.errors import RequestBodyError
from forerun.server.options import ServerOptions, host_of, is_loopback

OPEN_PATHS = ("/health", "/", "/page.css", "/page.js")
"""Paths that need no key."""
STATE_PATHS = ("/live", "/metrics")
"""Paths that tell one tenant about all."""


class Access:
    """Decides which requests are let in.

    Where there is no API key, a page of another site must not use the server through the browser of its reader. It
    cannot choose `Host`, though its own name may resolve to this machine (DNS rebinding); it cannot hide its `Origin`
    from a server that reads it, nor send JSON without the browser asking first, which only CORS answers.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._keys = [_digest(key.encode()) for key in options.api_key]
        self._state_keys = [] if options.metrics_key is None else [_digest(options.metrics_key.encode())]
        self._hosts = {options.host.lower(), *map(host_of, options.allowed_host)}

    def tenant(self, scope: MutableMapping[str, Any]) -> str | None:
        """Return the tenant of a request, by its key; None where none is needed.

        Raises:
            RequestBodyError: the request is not let in.
        """
        headers, path = Headers(scope=scope), scope["path"]
        if not self._keys:
            self._check_browser(headers, scope["method"])
        of_state = bool(self._state_keys) and path in STATE_PATHS
        keys = self._state_keys if of_state else self._keys
        if not keys or path in OPEN_PATHS:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        digest = _digest(given.strip().encode("latin-1"))
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
            raise _forbidden(
                f"{path} tells about all tenants, and API keys open it on the server's own machine alone. Start the "
                "server with --metrics-key KEY, and send that key."
            )
        return None if of_state else f"key {matches.index(True)}"

    def _check_browser(self, headers: Headers, method: str) -> None:
        """Raise RequestBodyError for what a page of another site may have sent."""
        options, hosts = self._options, headers.getlist("host")
        for host in hosts:
            name = host_of(host)
            if not (is_loopback(name) or name in self._hosts or "*" in options.allowed_host):
                raise _forbidden(
                    f"The server has no API key, and Host is {host[:100]!r}, which is no name of this machine that it "
                    f"knows. Start it with --allowed-host {name[:100] or 'NAME'}, or with --api-key."
                )
        for origin in headers.getlist("origin"):
            own = origin.partition("://")[2].lower() in map(str.lower, hosts)
            if not (own or origin in options.cors_origin or "*" in options.cors_origin):
                raise _forbidden(
                    f"The server has no API key, and pages of {origin[:100]!r} may not call it. Name that origin in "
                    "the key cors_origin of its configuration file, or start it with --api-key."
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


def _forbidden(message: str) -> RequestBodyError:
    return RequestBodyError(message, status=403)


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()
