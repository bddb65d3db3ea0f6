"""Servers under measurement: clients of OpenAI's API that note the time of each piece, and `forerun serve` itself."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.engine import LLM, EngineThread
from forerun.engine.results import StepOutput
from forerun.errors import ConfigError
from forerun.lab.bench.peers.peer import THREAD_VARIABLES
from forerun.lab.bench.serve.requests import EventReader, LoadRequest, TimedRequest, error_of
from forerun.server.protocol.model_texts import ModelTexts
from forerun.server.protocol.requests import parse_body
from forerun.utils.files import Closing

if TYPE_CHECKING:
    import aiohttp


USAGE: Mapping[str, Any] = {"stream_options": {"include_usage": True}}
"""The field that requests the number of tokens."""
LIMIT = 600.0
"""Seconds that a request may take."""
_LARGEST = 1 << 20
"""Bytes of a response that is not a stream, which are read."""


class MeasuredServer:
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

    async def __aenter__(self) -> MeasuredServer:
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

    async def send(self, request: LoadRequest, **more: Any) -> TimedRequest:
        """Send a request and read its answer. more: fields of its body."""
        assert self._session is not None
        content = json.dumps({"model": self.model, "stream": True, **USAGE, **request.body, **more}).encode()
        answered = TimedRequest(request, time.perf_counter())
        arrived = []
        events = EventReader()
        try:
            async with self._session.post(self.url + request.path, data=content, headers=_JSON) as response:
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
                status = response.status
                found = await _body(response)
        except (client_library().ClientError, TimeoutError) as error:
            raise ConfigError(
                f"{self.url}/v1/models gives no answer ({type(error).__name__}). Check the address."
            ) from None
        data = found.get("data") if isinstance(found, dict) else None
        if status != 200 or not isinstance(data, list) or not data or "id" not in data[0]:
            raise ConfigError(
                f"{self.url}/v1/models lists no model (status {status}: {error_of(found)}). Say what requests call it: "
                "--ask-for NAME."
            )
        return str(data[0]["id"])


_JSON = {"content-type": "application/json"}


def client_library() -> Any:
    """Import aiohttp. Raises ConfigError where it is not installed."""
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


_LOOK_EVERY = 0.1
_END = 20.0
"""Seconds that it has to end."""


@contextmanager
def started(
    arguments: Sequence[str], threads: int | None, say: Callable[[str], None] = lambda _: None
) -> Iterator[str]:
    """Start `forerun serve` on a free port; yield its address, and end the server with the context.

    Args:
        arguments: of `forerun serve`.
        threads: of torch in it; None leaves it.

    Raises:
        ConfigError: it does not come up.
    """
    command = [sys.executable, "-m", "forerun", "serve", *arguments, "--port", "0", "--log-format", "json"]
    say(f"starting forerun serve {' '.join(arguments)}")
    environment = dict(os.environ)
    if threads is not None:
        environment |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    with tempfile.TemporaryDirectory(prefix="forerun-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        try:
            yield _address(process, log)
        finally:
            process.terminate()
            try:
                process.wait(_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + LIMIT
    while True:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines:
            if (url := _ready(line)) is not None:
                return url
        code = process.poll()
        if code is not None or time.monotonic() > end:
            why = f"ended with exit code {code}" if code is not None else f"has not loaded within {LIMIT:g} seconds"
            last = " ".join(lines[-3:])[-600:]
            raise ConfigError(f"`forerun serve` {why}. The last that it said: {last or 'nothing'}")
        time.sleep(_LOOK_EVERY)


def _ready(line: str) -> str | None:
    """Parse the address from the log line that reports it."""
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return str(event["url"]) if event.get("event") == "ready" else None


class InProcessEngine(Closing):
    """An engine in this process that answers the same bodies as servers, without HTTP. Used as a context."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._thread = EngineThread(llm.shared)

    def close(self) -> None:
        """End its thread."""
        self._thread.close()

    async def send(self, request: LoadRequest, **more: Any) -> TimedRequest:
        """Send a request through the engine's thread, streamed. more: fields of the body."""
        answered = TimedRequest(request, time.perf_counter())
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[StepOutput] = loop.create_future()

        def sink(output: StepOutput) -> None:  # between two steps, in the engine's thread
            if output.chunk.text:
                answered.arrivals.append(time.perf_counter())
            if output.choice is not None or output.error is not None:
                answered.ended = time.perf_counter()
                loop.call_soon_threadsafe(ended.set_result, output)

        parsed = parse_body(request.path, {**request.body, "stream": True, **more}, self._llm.target.context_length)
        (made,) = parsed.requests(self._llm, ModelTexts(self._llm.tokenizer))
        self._thread.enter(made, sink)
        output = await ended
        if output.error is not None or output.choice is None:
            answered.error = str(output.error)
            return answered
        choice = output.choice
        answered.text = choice.text
        answered.num_tokens = len(choice.token_ids)
        answered.is_counted = True
        answered.prompt_tokens = len(made.prompt_token_ids)
        answered.num_forwards = choice.stats.num_forwards
        answered.num_drafted = choice.stats.num_draft_tokens
        answered.num_accepted = choice.stats.num_accepted_tokens
        return answered
