"""Endpoints that answer: whole answers and streams."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Any, cast

from sse_starlette.event import ensure_bytes
from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from forerun.engine import Generation, StepOutput
from forerun.engine.sequence import Request as PromptRequest
from forerun.server.logs import LOGGER
from forerun.server.progress import Replay, Sent, StreamState
from forerun.server.protocol.answers import Asked, Chunks, TokenPieces
from forerun.server.protocol.bodies import validated
from forerun.server.protocol.errors import OLLAMA_PATHS, error_at, error_response, failure_fields
from forerun.server.protocol.infill_api import InfillAnswers, InfillBody, LimitedText
from forerun.server.protocol.messages_api import MessageEvents, MessagesBody
from forerun.server.protocol.ollama_api import GenerateBody, OllamaChatBody, OllamaLines, load_answer
from forerun.server.protocol.requests import (
    CHAT_URL,
    COMPLETIONS_URL,
    INFILL_URL,
    MESSAGES_URL,
    OLLAMA_CHAT_URL,
    OLLAMA_GENERATE_URL,
    RESPONSES_URL,
    ChatBody,
    CompletionBody,
    CompletionRequest,
)
from forerun.server.protocol.responses_api import ResponseBody, ResponseEvents
from forerun.server.service import Service, while_connected

KEEP_ALIVE = 10.0
"""Seconds after which a stream says again that its prompt is being computed, and the log how far it is."""
_log = logging.getLogger(LOGGER)
_WITH_DONE = (CHAT_URL, COMPLETIONS_URL)

BODIES: Mapping[str, Any] = {
    CHAT_URL: ChatBody,
    COMPLETIONS_URL: CompletionBody,
    RESPONSES_URL: ResponseBody,
    MESSAGES_URL: MessagesBody,
    INFILL_URL: InfillBody,
    OLLAMA_GENERATE_URL: GenerateBody,
    OLLAMA_CHAT_URL: OllamaChatBody,
}
FORMS: Mapping[str, Any] = {
    CHAT_URL: Chunks,
    COMPLETIONS_URL: Chunks,
    RESPONSES_URL: ResponseEvents,
    MESSAGES_URL: MessageEvents,
    INFILL_URL: InfillAnswers,
    OLLAMA_GENERATE_URL: OllamaLines,
    OLLAMA_CHAT_URL: OllamaLines,
}


async def answer(service: Service, url: str, request: Request) -> Response:
    """Return the response to a request of one of BODIES.

    Raises:
        ForerunError: the request cannot be served.
        ClientDisconnect: the client has gone.
    """
    target = service.llm.target
    request.state.log_fields["model"] = service.name
    kept = service.kept[request.state.tenant]

    def read(content: bytes) -> CompletionRequest:
        made = validated(BODIES[url], content).request(target.context_length, service.sampling.options, kept)
        return cast(CompletionRequest, made)

    completion = await service.parsed(request, read)
    if ignored := completion.unread_by(service.llm.tokenizer):
        request.state.log_fields["ignored"] = ignored
    service.check_model(completion.model)
    if not completion.prompts:
        return JSONResponse(load_answer(completion, service.name))
    async with AsyncExitStack() as stack:
        stack.enter_context(service.admitted(completion, request.state.tenant))
        requests = await service.prepared(request, partial(service.requests, completion, request.state.tenant))
        active = ActiveResponse(service, completion, requests, request)
        stack.push_async_callback(active.close)
        await active.enter()
        if not completion.stream:
            return await while_connected(request, active.whole())
        return Stream(active.events(), active, stack.pop_all())


class ActiveResponse:
    """An answer that is being generated.

    Attributes:
        url: of the endpoint.
        form: makes the answer's bodies.
        complete: the stream has ended properly.
    """

    def __init__(
        self, service: Service, completion: CompletionRequest, requests: list[PromptRequest], request: Request
    ) -> None:
        self.service = service
        self.request = request
        self._completion = completion
        self._requests = requests
        self._prompts = [each.prompt_token_ids for each in requests]
        self._ended: list[list[StepOutput]] = [[] for _ in requests]
        # of a stream that goes on here, begun elsewhere; else new
        self._state: StreamState = getattr(request.state, "stream", None) or StreamState()
        state = self._state
        num_cut = sum(each.num_cut for each in requests)
        asked = Asked(service.texts, completion, self._prompts, service.name, state.name, state.created, num_cut)
        self.url = completion.url
        self.form = FORMS[completion.url](asked)
        self._started = time.monotonic()
        self.complete = False
        self._outputs = service.outputs(completion, requests, request)
        if completion.limits:
            self._outputs = self._limited(self._outputs, requests[0])
        self._first = asyncio.ensure_future(anext(self._outputs))
        self._num_sent = state.num_events
        self._num_computed = 0  # tokens of prompts, when that was last looked at

    @property
    def _generations(self) -> list[Generation]:
        return list(map(Generation.of, self._prompts, self._ended))

    async def enter(self) -> None:
        """Enter the engine. What it refuses later is an event of a stream.

        Raises:
            EngineClosedError: it takes no more requests.
        """
        await asyncio.sleep(0)  # until the first output is waited for
        if self._first.done():
            self._first.result()

    async def close(self) -> None:
        """End the requests in the engine, if they have not ended, and log how far an unanswered prompt has come."""
        self._look()
        self._first.cancel()
        try:
            await self._first
        except (asyncio.CancelledError, Exception):
            if self._num_computed:
                self.request.state.log_fields["computed_tokens"] = self._num_computed
        await self._outputs.aclose()
        self.service.answered(self._requests)

    def _look(self) -> dict[str, int]:
        """Return how far the prompts are (`Service.progress`)."""
        progress = self.service.progress(self._requests)
        self._num_computed = max(self._num_computed, progress["computed"])
        return progress

    async def _outputs_or_progress(self) -> AsyncIterator[tuple[int, StepOutput] | dict[str, int]]:
        """Yield the outputs; before the first, every KEEP_ALIVE seconds how far the prompts are, which is logged."""
        while not (await asyncio.wait((self._first,), timeout=KEEP_ALIVE))[0]:
            progress = self._look()
            if progress["computed"] < progress["prompt"]:
                _log.info({"event": "prompt", "request_id": self.request.state.request_id, **progress})
            yield progress
        yield self._first.result()
        async for each in self._outputs:
            yield each

    async def whole(self) -> Response:
        """Return the response, which another thread writes, since it may be long."""
        async for output in self._outputs_or_progress():
            if not isinstance(output, dict):
                self._count(*output)
        return await asyncio.to_thread(lambda: JSONResponse(self.form.whole(self._generations)))

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of the stream, those of one output together. An error is the last of them.

        `request.state.progress` is what `StreamState.advance` takes with what is yielded; absent with comments, and
        with the last events.
        """
        before = None
        form = self.form
        state = self._state
        params = self._completion.params
        replay = Replay(state.choices, params.greedy or params.seed is not None)
        first = state.choices.get(0, Sent())  # what has been sent elsewhere
        try:
            begun = [*form.begun()]
            if begun and not state.choices:
                yield self._numbered(0, first, begun)
            form.num_events = self._num_sent
            for piece in self._keep_alive(self._look(), first):
                yield piece
            async for found in self._outputs_or_progress():
                if isinstance(found, dict):
                    for piece in self._keep_alive(found, first):
                        yield piece
                    continue
                now = time.monotonic()
                if before is not None:
                    self.service.metrics.chunk(now - before)
                before = now
                for piece in self._pieces(*found, replay):
                    yield piece
            last = _events(self.url, [*form.last(self._generations)], is_last=True)
        except Exception as error:
            self.request.state.log_fields |= failure_fields(error)
            last = error_events(self.url, error, form.num_events)
        self.complete = True
        yield last

    def idle_line(self) -> bytes:
        """Return a line that adds nothing, with a blank before it that tells it from the answer's."""
        return b" " + _events(self.url, [self.form.idle()])

    async def _limited(
        self, outputs: AsyncGenerator[tuple[int, StepOutput], None], request: PromptRequest
    ) -> AsyncGenerator[tuple[int, StepOutput], None]:
        """Yield the outputs of the only prompt, whose choices end where their texts say."""
        tokens = self.service.texts.texts
        pieces = [TokenPieces(request.prompt_token_ids, tokens, request.marks) for _ in range(request.params.n)]
        texts = [LimitedText(self._completion.limits, each) for each in pieces]
        async with aclosing(outputs):
            async for index, output in outputs:
                texts[output.chunk.index].push(output)
                if all(text.is_over for text in texts):
                    self.service.engine.thread.abort(request.id)
                yield index, output

    def _keep_alive(self, progress: Mapping[str, int], sent: Sent) -> Iterator[bytes]:
        """Yield what a stream sends while its prompt is computed. sent: of its first choice."""
        for body in self.form.keep_alive(progress):
            yield f": {body}\n\n".encode() if isinstance(body, str) else self._numbered(0, sent, [body])

    def _pieces(self, index: int, output: StepOutput, replay: Replay) -> Iterator[bytes]:
        """Yield the events of an output that have not been sent elsewhere."""
        self._count(index, output)
        choice = index * self._completion.params.n + output.chunk.index
        for part, is_new in replay.divided(choice, output):
            bodies = [*self.form.of(index, part)]
            if not is_new:
                self.form.num_events = self._num_sent
            elif bodies:
                yield self._numbered(choice, replay.now[choice], bodies)

    def _numbered(self, choice: int, sent: Sent, bodies: list[dict[str, Any]]) -> bytes:
        """Encode events, and keep what is known when they have been sent."""
        self._num_sent = self.form.num_events
        self.request.state.progress = (choice, sent, self._num_sent)
        return _events(self.url, bodies)

    def _count(self, index: int, output: StepOutput) -> None:
        self.service.answered(self._requests[index : index + 1])
        if output.choice is not None:
            self._ended[index].append(output)
            seconds = time.monotonic() - self._started
            self.service.record(output, self._completion, len(self._prompts[index]), self.request, seconds)


class Stream(EventSourceResponse):
    """A stream of events; when it ends, for whatever reason, its request ends in the engine.

    Args:
        resources: closed at the end of the stream.
    """

    def __init__(self, events: AsyncIterator[bytes], active: ActiveResponse, resources: AsyncExitStack) -> None:
        lines: dict[str, Any] = {}
        if active.url.startswith(OLLAMA_PATHS):
            lines["media_type"] = "application/x-ndjson"
            lines["ping_message_factory"] = active.idle_line
        super().__init__(events, sep="\n", send_timeout=active.service.options.send_timeout, **lines)
        self._active = active
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        log_fields = self._active.request.state.log_fields
        async with self._resources:
            try:
                await super().__call__(scope, receive, send)
            except SendTimeoutError:  # the connection is closed, since the response is not complete
                log_fields["cut"] = "the client did not read"
            finally:
                if not self._active.complete:
                    log_fields["disconnected"] = True
                    self._active.service.metrics.disconnected()


def error_events(url: str, error: Exception, number: int) -> bytes:
    """Return the events that end a stream with an error. number: of the event, where they have numbers."""
    body = error_response(error)[1]
    event = {"sequence_number": number, **body["error"], "type": "error"}  # the type of the error is not said
    return _events(url, [event if url == RESPONSES_URL else error_at(url, body)], is_last=True)


def _events(url: str, bodies: list[dict[str, Any]], *, is_last: bool = False) -> bytes:
    """Encode events, or lines where the endpoint's streams are of lines. is_last: the stream ends after them."""
    events = [(body.get("type"), json.dumps(body, ensure_ascii=False, separators=(",", ":"))) for body in bodies]
    if url.startswith(OLLAMA_PATHS):
        return "".join(f"{line}\n" for _, line in events).encode()
    ends = [(None, "[DONE]")] if is_last and url in _WITH_DONE else []
    return b"".join(ensure_bytes({"event": kind, "data": data}, "\n") for kind, data in [*events, *ends])
