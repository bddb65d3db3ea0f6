"""A server that speaks OpenAI's API, asked over HTTP: answers are read as streams, with the time of each piece."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forerun.bench.serve.answers import Answered, EventReader, error_of
from forerun.bench.serve.asks import Ask
from forerun.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp

USAGE: Mapping[str, Any] = {"stream_options": {"include_usage": True}}
"""By which servers are asked for the number of tokens."""
LIMIT = 600.0
"""Seconds that a request may take."""
_LARGEST = 1 << 20
"""Bytes of a response that is not a stream, which are read."""


class Server:
    """A server at an address. Used as a context, inside the event loop.

    Args:
        url: with or without /v1.
        model: what requests call it; None asks the server, and takes the first that it lists.
        api_key: sent as a bearer token; None sends none.
    """

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--url is {url!r}, but must begin with http:// or https://.")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.model = model
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Server:
        http = client_library()
        self._session = http.ClientSession(
            headers=self._headers,
            timeout=http.ClientTimeout(total=LIMIT),
            # some servers (llama.cpp's) close a connection after a stream and do not say so: the next request fails
            connector=http.TCPConnector(limit=0, force_close=True),
            read_bufsize=1 << 18,
        )
        try:
            if self.model is None:
                self.model = await self._first_model()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def send(self, ask: Ask, **more: Any) -> Answered:
        """The answer to a request. more: fields of its body."""
        assert self._session is not None
        content = json.dumps({"model": self.model, "stream": True, **USAGE, **ask.body, **more}).encode()
        answered, arrived, events = Answered(ask, time.perf_counter()), [], EventReader()
        try:
            async with self._session.post(self.url + ask.path, data=content, headers=_JSON) as response:
                if response.status != 200:
                    answered.error = f"status {response.status}: {error_of(await _body(response))}"
                else:
                    async for piece in response.content.iter_any():
                        now = time.perf_counter()
                        arrived += [(now, data) for data in events.push(piece)]
        except (client_library().ClientError, TimeoutError) as error:
            answered.error = f"{type(error).__name__}: {error}".rstrip(": ")
        answered.ended = time.perf_counter()
        if answered.error is None:
            answered.read(arrived)
        return answered

    async def _first_model(self) -> str:
        assert self._session is not None
        try:
            async with self._session.get(f"{self.url}/v1/models") as response:
                status, found = response.status, await _body(response)
        except (client_library().ClientError, TimeoutError) as error:
            raise ConfigError(
                f"{self.url}/v1/models gives no answer ({type(error).__name__}). Check the address."
            ) from None
        data = found.get("data") if isinstance(found, dict) else None
        if status != 200 or not isinstance(data, list) or not data or "id" not in data[0]:
            raise ConfigError(
                f"{self.url}/v1/models lists no model (status {status}). Say what requests call it: --ask-for NAME."
            )
        return str(data[0]["id"])


_JSON = {"content-type": "application/json"}


def client_library() -> Any:
    """aiohttp. Raises ConfigError where it is not installed."""
    try:
        import aiohttp
    except ModuleNotFoundError:
        raise ConfigError(
            "`forerun bench serve` needs aiohttp, which is not installed: pip install 'forerun[bench]'"
        ) from None
    return aiohttp


async def _body(response: aiohttp.ClientResponse) -> Any:
    try:
        return json.loads(await response.content.read(_LARGEST))
    except ValueError:
        return None
