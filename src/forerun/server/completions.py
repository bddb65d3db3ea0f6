"""Chats, completions and responses: whole answers and streams."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import ExitStack, aclosing, suppress
from typing import Any, TypeVar

from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forerun.engine import StepOutput
from forerun.server.middleware import ClientGoneError, Receive, Scope, Send
from forerun.server.protocol.errors import error_response
from forerun.server.protocol.requests import CompletionRequest, parse_body
from forerun.server.protocol.responses_api import RESPONSES_URL, ResponseEvents, parse_response
from forerun.server.protocol.streaming import Chunks
from forerun.server.service import Answering, Service

T = TypeVar("T")
_DONE = "[DONE]"


async def answer(service: Service, url: str, request: Request) -> Response:
    """The response to a chat or completion.

    Raises:
        ForerunError: the request cannot be served.
        ClientGoneError: nobody waits for the answer any more.
    """
    body, length = await service.body(request), service.llm.target.context_length
    asked = parse_response(body, length) if url == RESPONSES_URL else parse_body(url, body, length)
    service.check_model(asked.model)
    with ExitStack() as stack:
        stack.enter_context(service.admitted(asked))
        prompts = await asyncio.to_thread(service.encode, asked)
        answering = service.answering(asked, prompts, request)
        stack.callback(answering.close)
        begun = ActiveResponse(service, asked, prompts, answering, request)
        if not asked.stream:
            return JSONResponse(await while_connected(request, begun.whole()))
        # the first output is waited for, so that what refuses the request has a status of its own
        first = await while_connected(request, anext(begun.outputs))
        return Stream(begun.events(first), begun, stack.pop_all())


class ActiveResponse:
    """An answer under way.

    Attributes:
        outputs: of the engine.
    """

    def __init__(
        self,
        service: Service,
        asked: CompletionRequest,
        prompts: list[list[int]],
        answering: Answering,
        request: Request,
    ) -> None:
        self.service, self._answering, self.request = service, answering, request
        self._asked, self._prompts = asked, prompts
        named: dict[str, Any] = {"model": service.name, "name": uuid.uuid4().hex, "created": int(time.time())}
        self._form: Chunks | ResponseEvents
        if asked.url == RESPONSES_URL:
            self._form = ResponseEvents(service.responses, asked, **named)
        else:
            self._form = Chunks(service.responses, asked, prompts, **named)
        self._started = time.monotonic()
        self.outputs: AsyncGenerator[tuple[int, StepOutput], None] = answering.outputs()
        self.complete = False

    async def whole(self) -> dict[str, Any]:
        """The body of the response."""
        async with aclosing(self.outputs) as outputs:
            async for place, output in outputs:
                self._count(place, output)
        return self._form.whole(self._answering.generations)

    async def events(self, first: tuple[int, StepOutput]) -> AsyncIterator[dict[str, str]]:
        """The stream's events. An error is the last of them."""
        before = time.monotonic()
        try:
            async with aclosing(self.outputs) as outputs:
                async for place, output in _chained(first, outputs):
                    now = time.monotonic()
                    self.service.metrics.chunk(now - before)
                    before = now
                    self._count(place, output)
                    for body in self._form.of(place, output):
                        yield _event(body)
            for body in self._form.last(self._answering.generations):
                yield _event(body)
            self.complete = True
            if self._form.ends_with_done:
                yield {"data": _DONE}
        except Exception as error:
            self.request.state.told["error"] = type(error).__name__
            self.complete = True
            yield _event(self._form.failure(error_response(error)[1]))

    def _count(self, place: int, output: StepOutput) -> None:
        if output.choice is not None:
            seconds = time.monotonic() - self._started
            self.service.ended(output, self._asked, len(self._prompts[place]), self.request, seconds)


class Stream(EventSourceResponse):
    """A stream of events. However it ends, what is left of its request ends with it.

    Args:
        held: what the request holds.
    """

    def __init__(self, events: AsyncIterator[dict[str, str]], begun: ActiveResponse, held: ExitStack) -> None:
        super().__init__(events, sep="\n", send_timeout=begun.service.options.send_timeout)
        self._begun, self._held = begun, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        told = self._begun.request.state.told
        with self._held:
            try:
                await super().__call__(scope, receive, send)
            except SendTimeoutError:  # the connection is closed, since the response is not complete
                told["cut"] = "the client did not read"
            finally:
                if not self._begun.complete:
                    told["disconnected"] = True
                    self._begun.service.metrics.disconnected()


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """What comes of the work. Raises ClientGoneError as soon as nobody waits for it."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for each in (task, gone):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _chained(
    first: tuple[int, StepOutput], others: AsyncGenerator[tuple[int, StepOutput], None]
) -> AsyncIterator[tuple[int, StepOutput]]:
    yield first
    async for each in others:
        yield each


def _event(body: dict[str, Any]) -> dict[str, str]:
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return {"event": body["type"], "data": data} if "type" in body else {"data": data}
