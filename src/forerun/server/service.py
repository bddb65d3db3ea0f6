"""The model behind the endpoints: its engine thread, admission of requests, and their metrics, journal and log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from starlette.requests import Request

from forerun.config import SamplingParams
from forerun.engine import LLM, EngineThread, Generation, StepOutput
from forerun.engine.engine_thread import LoopInbox
from forerun.errors import QueueFullError, RequestBodyError, RequestTimeoutError
from forerun.server.body_inspector import LARGE_BODY, BodyInspector, Limits, longest_token
from forerun.server.logs import LOGGER
from forerun.server.metrics import MetricFactory, Metrics, Prometheus
from forerun.server.options import ServerOptions
from forerun.server.protocol.requests import CompletionRequest
from forerun.server.protocol.responses import Responses
from forerun.server.protocol.tools import check_template_carries
from forerun.server.traffic_journal import ServerJournal, category_of
from forerun.utils.json_file import parse_json


class EngineRequest:
    """The outputs of one request's prompts in the engine, in one queue.

    Args:
        inbox: of the event loop.
        prompts: token ids of each.
        stream: an output per step; else one per choice.
        timeout: seconds that all of it may take.

    Attributes:
        generations: of each prompt, complete when `outputs` has ended.
    """

    def __init__(
        self,
        thread: EngineThread,
        inbox: LoopInbox,
        prompts: Seq[list[int]],
        params: SamplingParams,
        *,
        stream: bool,
        timeout: float,
    ) -> None:
        self._thread, self._inbox = thread, inbox
        self._prompts, self._params, self._stream = prompts, params, stream
        self._timeout = timeout
        self._ids: list[int] = []
        self._ended: list[list[StepOutput]] = [[] for _ in prompts]
        self._arrived: asyncio.Queue[tuple[int, StepOutput] | None] = asyncio.Queue()

    @property
    def generations(self) -> list[Generation]:
        """Return the generation of each prompt."""
        return [Generation.of(prompt, outputs) for prompt, outputs in zip(self._prompts, self._ended, strict=True)]

    def submit(self) -> None:
        """Submit the prompts to the engine; all of them or none.

        Raises:
            PromptError, SamplingError: one of them cannot be served.
            EngineClosedError: no more requests are taken.
        """

        def sink(index: int, output: StepOutput) -> None:
            self._inbox.put(self._arrived.put_nowait, (index, output))

        try:
            for index, prompt in enumerate(self._prompts):
                made = partial(sink, index)
                self._ids.append(self._thread.submit(prompt, self._params, made, stream=self._stream, quick=True))
        except BaseException:
            self.close()
            raise

    async def outputs(self) -> AsyncGenerator[tuple[int, StepOutput], None]:
        """Yield (index of the prompt, output), until all choices have ended.

        Raises:
            RequestTimeoutError: they have not within the timeout.
            Exception: the error of the first that fails.
        """
        unfinished = len(self._prompts) * self._params.n
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
        for request_id in self._ids:
            self._thread.abort(request_id)
        self._ids.clear()


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
        length = longest_token(llm.tokenizer)
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

    async def body(self, request: Request, *, is_prompt: bool = True) -> Any:
        """Parse a request's body. Raises RequestBodyError.

        Args:
            is_prompt: inspect large bodies first, and refuse those that exceed the context before they are parsed.
        """
        content = await request.body()
        if is_prompt and len(content) > LARGE_BODY:
            self._limits.check(await asyncio.to_thread(self._body_inspector.inspect, content))
        return await parsed_body(content)

    def encode(self, completion: CompletionRequest, tenant: str | None) -> list[list[int]]:
        """Tokenize a request's prompts and prepare its grammar. Raises RequestBodyError, GrammarError."""
        grammar = completion.params.grammar
        if grammar is not None and self.llm.engine.grammars is not None:
            self.llm.engine.grammars.prepare(grammar, tenant)  # in this thread, since it may take a second
        prompts = completion.encode(self.llm.tokenizer, self.llm.target.name)
        context = self.llm.target.context_length
        for prompt in prompts:
            if len(prompt) >= context:
                raise RequestBodyError(
                    f"The prompt has {len(prompt)} tokens, but the context of {self.name} holds {context}, and at "
                    "least one position is needed for the answer. Shorten it.",
                    param=completion.prompt_field,
                    code="context_length_exceeded",
                )
        return prompts

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

    def submit_request(self, completion: CompletionRequest, prompts: Seq[list[int]], request: Request) -> EngineRequest:
        """Submit a request to the engine. Raises as `EngineRequest.submit`."""
        params = replace(completion.params, tenant=request.state.tenant)
        request.state.category = "" if self._journal is None else category_of(request)
        if self._inbox is None:
            self._inbox = LoopInbox()
        timeout = self.options.request_timeout
        made = EngineRequest(self.thread, self._inbox, prompts, params, stream=completion.stream, timeout=timeout)
        made.submit()
        num_tokens = sum(map(len, prompts))
        self.metrics.prompted(num_tokens)
        request.state.log_fields.update(prompt_tokens=num_tokens, prompts=len(prompts), stream=completion.stream)
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


async def parsed_body(content: bytes) -> Any:
    """Parse a JSON body. Raises RequestBodyError."""
    arguments = (content, "The request's body", RequestBodyError)
    if len(content) <= _SMALL_BODY:
        return parse_json(*arguments, remedy="Send JSON.")
    return await asyncio.to_thread(parse_json, *arguments, remedy="Send JSON.")
