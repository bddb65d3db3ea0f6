"""The model behind the endpoints: its engine thread, admission of requests, and their metrics, journal and log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar

from starlette.requests import Request

from forerun.engine import LLM, EngineThread, Generation, StepOutput
from forerun.engine.engine_thread import LoopInbox
from forerun.engine.request_checks import naming_prompt
from forerun.engine.sequence import Request as PromptRequest
from forerun.errors import QueueFullError, RequestBodyError, RequestTimeoutError
from forerun.server.body_inspector import LARGE_BODY, BodyInspector, Limits
from forerun.server.logs import LOGGER
from forerun.server.metrics import MetricFactory, Metrics, Prometheus
from forerun.server.options import ServerOptions
from forerun.server.protocol.requests import CompletionRequest
from forerun.server.protocol.responses import Responses
from forerun.server.protocol.tools import check_template_carries
from forerun.server.traffic_journal import ServerJournal, category_of
from forerun.utils.json_file import parse_json
from forerun.utils.vocabulary import longest_token

T = TypeVar("T")


class EngineRequest:
    """The outputs of one request's prompts in the engine, in one queue.

    Args:
        inbox: of the event loop.
        requests: of each prompt.
        timeout: seconds that all of it may take.

    Attributes:
        generations: of each prompt, complete when `outputs` has ended.
    """

    def __init__(self, thread: EngineThread, inbox: LoopInbox, requests: Seq[PromptRequest], *, timeout: float) -> None:
        self._thread, self._inbox, self._requests, self._timeout = thread, inbox, requests, timeout
        self._ended: list[list[StepOutput]] = [[] for _ in requests]
        self._arrived: asyncio.Queue[tuple[int, StepOutput] | None] = asyncio.Queue()

    @property
    def generations(self) -> list[Generation]:
        """Return the generation of each prompt."""
        pairs = zip(self._requests, self._ended, strict=True)
        return [Generation.of(request.prompt_token_ids, outputs) for request, outputs in pairs]

    def submit(self) -> None:
        """Submit the prompts to the engine; all of them or none. Raises EngineClosedError if it takes no more."""

        def sink(index: int, output: StepOutput) -> None:
            self._inbox.put(self._arrived.put_nowait, (index, output))

        try:
            for index, request in enumerate(self._requests):
                self._thread.enter(request, partial(sink, index), quick=True)
        except BaseException:
            self.close()
            raise

    async def outputs(self) -> AsyncGenerator[tuple[int, StepOutput], None]:
        """Yield (index of the prompt, output), until all choices have ended.

        Raises:
            RequestTimeoutError: they have not within the timeout.
            Exception: the error of the first that fails.
        """
        unfinished = sum(request.params.n for request in self._requests)
        end = asyncio.get_running_loop().call_later(self._timeout, self._arrived.put_nowait, None)
        try:
            while unfinished:
                arrived = await self._arrived.get()
                if arrived is None:
                    raise RequestTimeoutError(
                        f"The request was not finished within {self._timeout:g} seconds, the limit of this "
                        "server. Ask for fewer tokens."
                    )
                index, output = arrived
                if output.error is not None:
                    with naming_prompt(index, len(self._requests)):
                        raise output.error
                if output.choice is not None:
                    unfinished -= 1
                    self._ended[index].append(output)
                yield index, output
        finally:
            end.cancel()
            self.close()

    def close(self) -> None:
        """Abort what has not ended."""
        for request in self._requests:
            self._thread.abort(request.id)


_SMALL_BODY = 1 << 15
"""Bytes of JSON that are parsed in the event loop's own thread; more would keep others waiting."""
_log = logging.getLogger(LOGGER)


class Service:
    """The model that is served.

    Args:
        name: its name in requests and answers.
        metric_factory: makes its metrics; None: Prometheus, which /metrics reads.

    Attributes:
        num_choices: choices in the engine or waiting for it.
        created: time of loading, Unix time in seconds.

    Raises:
        ConfigError: the journal cannot be written.
    """

    def __init__(
        self, llm: LLM, name: str, options: ServerOptions, metric_factory: MetricFactory | None = None
    ) -> None:
        self.llm, self.name, self.options = llm, name, options
        self.thread = EngineThread(llm.shared)
        self._metric_factory = metric_factory or Prometheus(name)
        self.metrics = Metrics(llm, lambda: self.num_choices, self._metric_factory)
        self.responses = Responses(llm.tokenizer)
        self.created = int(time.time())
        self.num_choices = 0
        self._body_inspector = BodyInspector()
        length = None if llm.tokenizer is None else longest_token(llm.tokenizer)
        self._limits = Limits(name, llm.target.context_length, length, options.max_prompts)
        where, size = options.journal, options.journal_size
        self._journal = None if where is None else ServerJournal(llm, name, where, size)
        self._inbox: LoopInbox | None = None  # of the loop that serves

    def metrics_text(self) -> bytes:
        """Return all metrics in the text format of Prometheus. Raises RequestBodyError if they go elsewhere."""
        if isinstance(self._metric_factory, Prometheus):
            return self._metric_factory.text()
        raise RequestBodyError("The metrics of this server are exported elsewhere.", status=404)

    def close(self) -> None:
        """End the engine thread and the body inspector, and write the rest of the journal."""
        self.thread.close()
        self._body_inspector.close()
        if self._journal is not None:
            self._journal.close()

    def check_model(self, model: str | None) -> None:
        """Raise RequestBodyError if a request names another model."""
        if model not in (None, self.name):
            raise RequestBodyError(
                f"The model of the request is not the one that is served, {self.name!r}. Correct it.",
                param="model",
                code="model_not_found",
                status=404,
            )

    async def body(self, request: Request, read: Callable[[Any], T], *, is_prompt: bool = True) -> T:
        """Parse a request's body, and return what `read` makes of its JSON value. Raises RequestBodyError.

        Args:
            is_prompt: inspect large bodies first, and refuse those that exceed the context before they are parsed.
        """
        content = await request.body()
        if is_prompt and len(content) > LARGE_BODY:
            self._limits.check(await asyncio.to_thread(self._body_inspector.inspect, content))
        return await parsed_body(content, read)

    def encode(self, completion: CompletionRequest, tenant: str | None) -> list[PromptRequest]:
        """Tokenize and check a request's prompts, with all that its options need. Raises ForerunError.

        tenant: None without keys: then each body has its own share of the engine.
        """
        prompts = completion.encode(self.llm.tokenizer, self.llm.target.name)
        context = self.llm.target.context_length
        for index, prompt in enumerate(prompts):
            if len(prompt) >= context:
                with naming_prompt(index, len(prompts)):
                    raise RequestBodyError(
                        f"The prompt has {len(prompt)} tokens, but the context of {self.name} holds {context}, and at "
                        "least one position is needed for the answer. Shorten it.",
                        param=completion.prompt_field,
                        code="context_length_exceeded",
                    )
        params = replace(completion.params, tenant=tenant)
        return self.llm.engine.requests(prompts, params, stream=completion.stream, flow=tenant or object())

    @contextmanager
    def admitted(self, completion: CompletionRequest) -> Iterator[None]:
        """Reserve places in the queue for a request's choices, until the end.

        Raises:
            QueueFullError: the queue is full.
            RequestBodyError: the request has more choices than one request may have.
        """
        count = len(completion.prompts) * completion.params.n
        if count > self.options.max_prompts:
            raise RequestBodyError(
                f"The request asks for {count} choices, {completion.params.n} for each of {len(completion.prompts)} "
                f"prompts, but this server takes at most {self.options.max_prompts}. Send several requests.",
                param=completion.prompt_field,
            )
        most = self.llm.engine.config.max_batch + self.options.max_queue
        if self.num_choices and self.num_choices + count > most:
            raise QueueFullError(
                f"{self.num_choices} choices are computed or wait, of at most {most}, and the request asks for "
                f"{count}. Send it again later."
            )
        self.num_choices += count
        try:
            yield
        finally:
            self.num_choices -= count

    def submit_request(
        self, completion: CompletionRequest, requests: Seq[PromptRequest], request: Request
    ) -> EngineRequest:
        """Submit a request's prompts to the engine. Raises as `EngineRequest.submit`."""
        request.state.category = "" if self._journal is None else category_of(request)
        if self._inbox is None:
            self._inbox = LoopInbox()
        made = EngineRequest(self.thread, self._inbox, requests, timeout=self.options.request_timeout)
        made.submit()
        num_tokens = sum(len(each.prompt_token_ids) for each in requests)
        self.metrics.prompted(num_tokens)
        request.state.log_fields.update(prompt_tokens=num_tokens, prompts=len(requests), stream=completion.stream)
        if self.options.log_prompts:
            _log.info({"event": "prompts", "request_id": request.state.request_id, "prompts": completion.prompts})
        return made

    def record(
        self, output: StepOutput, completion: CompletionRequest, prompt: int, request: Request, seconds: float
    ) -> None:
        """Record a finished choice in metrics, journal and log.

        Args:
            prompt: number of tokens of its prompt.
            seconds: since its request was admitted.
        """
        choice = output.choice
        assert choice is not None
        self.metrics.ended(choice.stats, choice.finish_reason, seconds)
        if self._journal is not None:
            self._journal.answered(output, completion.params, prompt, request.state.category, seconds)
        fields = request.state.log_fields
        fields["completion_tokens"] = fields.get("completion_tokens", 0) + len(choice.token_ids)
        fields.setdefault("finish_reasons", []).append(choice.finish_reason)
        fields["draft_tokens"] = fields.get("draft_tokens", 0) + choice.stats.num_draft_tokens
        fields["accepted_tokens"] = fields.get("accepted_tokens", 0) + choice.stats.num_accepted_tokens
        fields["speculation"] = choice.stats.speculation
        if self.options.log_prompts:
            _log.info({"event": "answer", "request_id": request.state.request_id, "text": choice.text})

    def live(self) -> dict[str, Any]:
        """Return the current state of the engine."""
        engine = self.llm.engine
        running = len(engine.scheduler.running)
        return {
            "running": running,
            "waiting": max(self.num_choices - running, 0),
            "max_batch": engine.config.max_batch,
            "last_step": asdict(engine.last_step),
        }

    def limits(self) -> Mapping[str, str]:
        """Return what this server cannot do -> the reason."""
        target, found = self.llm.target, dict[str, str]()
        if self.llm.tokenizer is None:
            found["text"] = "the model has no tokenizer: prompts are token ids"
        if not getattr(self.llm.tokenizer, "chat_template", None):
            found["chat"] = "the model has no chat template"
        try:
            check_template_carries(self.llm.tokenizer, "tools")
        except RequestBodyError:
            found["tools"] = "the chat template does not carry them in the known format"
        if find_spec("llguidance") is None:
            found["response_format"] = "only text: llguidance is not installed"
        if not self.llm.exact:
            found["exactness"] = f"speculation may change the text: {target.exactness.reason}"
        if self.llm.drafter is None:
            found["speculation"] = "there is no drafter"
        return found


async def parsed_body(content: bytes, read: Callable[[Any], T]) -> T:
    """Parse a JSON body, and return what `read` makes of its value. Raises RequestBodyError."""

    def parsed() -> T:
        return read(parse_json(content, "The request's body", RequestBodyError, remedy="Send JSON."))

    return parsed() if len(content) <= _SMALL_BODY else await asyncio.to_thread(parsed)
