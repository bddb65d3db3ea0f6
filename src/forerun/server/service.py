"""The model behind the endpoints: its engine thread, admission of requests, and their metrics, journal and log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from forerun.chat.response_format import read_format
from forerun.engine import LLM, AsyncLLM, StepOutput
from forerun.engine.sequence import Request as PromptRequest
from forerun.errors import QueueFullError, RequestBodyError
from forerun.models.published_sampling import Published, published_sampling
from forerun.server.kept_responses import KeptResponses
from forerun.server.logs import LOGGER
from forerun.server.metrics import MetricFactory, Metrics, Prometheus
from forerun.server.options import ServerOptions
from forerun.server.protocol.model_texts import ModelTexts
from forerun.server.protocol.requests import CompletionRequest
from forerun.server.traffic_journal import ServerJournal, category_of
from forerun.utils.children import MOST_CHILDREN, RENDERERS, in_thread
from forerun.utils.model_names import names_of

T = TypeVar("T")


_SMALL_BODY = 1 << 15
"""Bytes of a body that is parsed in the event loop's own thread; more would keep others waiting."""
_KEPT_BYTES, _MOST_KEPT = 64 << 20, 4096
"""Of responses that are kept, which tenants share evenly."""
_log = logging.getLogger(LOGGER)


class Preparation:
    """Threads that make requests of bodies, apart from the event loop's own, and shared fairly by tenants.

    most_each: threads that one tenant may have.
    """

    def __init__(self, most_each: int) -> None:
        self._most_each = most_each
        self._executor = ThreadPoolExecutor(MOST_CHILDREN, "prepare")
        self._running = Counter[str | None]()
        self._waiting: list[tuple[str | None, asyncio.Future[None]]] = []

    async def run(self, work: Callable[[], T], tenant: str | None) -> T:
        """Return the result of work in one of the threads. Where this is cancelled, the work ends."""
        ready = asyncio.get_running_loop().create_future()
        self._waiting.append((tenant, ready))
        self._start()
        try:
            await ready
        except asyncio.CancelledError:
            if ready.cancelled():
                self._waiting.remove((tenant, ready))
            else:
                self._end(tenant)
            raise
        return await in_thread(work, self._executor, partial(self._end, tenant))

    def _start(self) -> None:
        """Let those begin that wait, of the tenant with the fewest threads first."""
        while self._running.total() < MOST_CHILDREN:
            possible = [each for each in self._waiting if self._running[each[0]] < self._most_each]
            if not possible:
                return
            tenant, ready = chosen = min(possible, key=lambda each: self._running[each[0]])
            self._waiting.remove(chosen)
            self._running[tenant] += 1
            ready.set_result(None)

    def _end(self, tenant: str | None) -> None:
        self._running[tenant] -= 1
        self._start()

    def close(self) -> None:
        """Take no more work."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class Service:
    """The model that is served.

    Args:
        name: its name in requests and answers.
        metric_factory: makes its metrics; None: Prometheus, which /metrics reads.

    Attributes:
        engine: computes the requests.
        metric_factory: made its metrics.
        texts: of the target's tokens.
        kept: tenant -> its responses.
        created: time of loading, Unix time in seconds.

    Raises:
        ConfigError: the journal cannot be written, or the response template is none, be it the tokenizer's.
    """

    def __init__(
        self, llm: LLM, name: str, options: ServerOptions, metric_factory: MetricFactory | None = None
    ) -> None:
        self.llm = llm
        self.name = name
        self.options = options
        llm.target.loaded_by = llm.target.loaded_by or llm.target.name  # costs are stored by it
        llm.target.name = name  # what clients are told shows no path
        self._names = names_of(name, llm.target.loaded_by)
        self.engine = AsyncLLM(llm)
        self.metric_factory = metric_factory or Prometheus(name)
        self._num_held = Counter[str | None]()  # choices, by tenant
        self._unanswered: dict[int, int] = {}  # by id of the engine's requests without output, the prompts' tokens
        self.metrics = Metrics(llm, self.live, self.metric_factory)
        template = options.response_template
        self.texts = ModelTexts(llm.tokenizer, None if template is None else read_format(template))
        self.texts.response_format(has_tools=False)  # a tokenizer's own that is none is refused now
        _log.info({"event": "sampling", "defaults": dict(self.sampling.options), "source": self.sampling.source})
        self.created = int(time.time())
        self._large_bodies = asyncio.Lock()
        share = max(len(options.api_key), 1)
        self._preparation = Preparation(MOST_CHILDREN if share == 1 else MOST_CHILDREN // 2)
        if llm.tokenizer is not None:
            RENDERERS.start()
            llm.engine.grammars.get_ready()
        self.kept = defaultdict[str | None, KeptResponses](
            partial(KeptResponses, _KEPT_BYTES // share, _MOST_KEPT // share)
        )
        self._journal = (
            None if options.journal is None else ServerJournal(llm, name, options.journal, options.journal_size)
        )

    @property
    def sampling(self) -> Published:
        """Return the options of requests that leave them out: those that the model's files recommend, or that were
        published for its family, else OpenAI's."""
        target = self.llm.target
        own = target.recommended_sampling
        if own or not (name := getattr(target, "published_name", "")):
            return Published(own, "the model's files" if own else "OpenAI's defaults")
        return published_sampling(name, target.num_parameters)

    @property
    def num_choices(self) -> int:
        """Return the number of choices in the engine or waiting for it."""
        return self._num_held.total()

    def close(self) -> None:
        """End the engine thread, and write the rest of the journal."""
        self.engine.thread.close()
        if self.llm.adapting is not None:
            self.llm.adapting.close()
        self._preparation.close()
        if self._journal is not None:
            self._journal.close()

    def check_model(self, model: str | None) -> None:
        """Raise RequestBodyError if a request names another model."""
        if model and not {model, model.removesuffix(":latest")} & self._names:
            raise RequestBodyError(
                f"The model of the request is not the one that is served, {self.name!r}. Correct it.",
                param="model",
                code="model_not_found",
                status=404,
            )

    async def parsed(self, request: Request, read: Callable[[bytes], T]) -> T:
        """Return what `read` makes of a request's body: of large bodies one at a time, in another thread."""
        content: bytes = request.state.body
        if len(content) <= _SMALL_BODY:
            return read(content)
        async with self._large_bodies:
            return await asyncio.to_thread(read, content)

    async def prepared(self, request: Request, work: Callable[[], T]) -> T:
        """Return the result of work for a request, in a thread that its tenant has a share of.

        Raises:
            ClientDisconnect: the client has gone; the work ends.
        """
        return await while_connected(request, self._preparation.run(work, request.state.tenant))

    def requests(self, completion: CompletionRequest, tenant: str | None) -> list[PromptRequest]:
        """Return the engine's requests of a request's prompts. Raises as `CompletionRequest.requests`.

        tenant: None without keys: then each body has its own share of the engine.
        """
        salt = completion.params.tenant
        owner = tenant if salt is None else f"{tenant or ''}\n{salt}"  # no key has a line break
        owned = replace(completion, params=replace(completion.params, tenant=owner))
        scope = None if self.options.trust_priority else tenant
        return [replace(each, scope=scope) for each in owned.requests(self.llm, self.texts, tenant or object())]

    @contextmanager
    def admitted(self, completion: CompletionRequest, tenant: str | None) -> Iterator[None]:
        """Reserve places in the queue for a request's choices, until the end.

        Half of the places are kept for the keys, as many for each: however many one key holds, another finds its own.

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
        num_others = max(len({*self.options.api_key}) - 1, 0)
        own = most // (2 * (num_others + 1))
        kept = own * num_others - sum(min(num, own) for key, num in self._num_held.items() if key != tenant)
        if self.num_choices and self.num_choices + count > most - kept:
            more = f", {kept} more are kept for other keys" if kept else ""
            raise QueueFullError(
                f"{self.num_choices} choices are computed or wait, of at most {most}{more}, and the request asks for "
                f"{count}. Send it again later."
            )
        self._num_held[tenant] += count
        try:
            yield
        finally:
            self._num_held[tenant] -= count

    def outputs(
        self, completion: CompletionRequest, requests: Seq[PromptRequest], request: Request
    ) -> AsyncGenerator[tuple[int, StepOutput], None]:
        """Record that a request's prompts enter the engine, and return the outputs, as `AsyncLLM.outputs`."""
        request.state.category = "" if self._journal is None else category_of(request)
        self._unanswered |= {each.id: len(each.prompt_token_ids) for each in requests}
        num_tokens = sum(len(each.prompt_token_ids) for each in requests)
        self.metrics.prompted(num_tokens)
        request.state.log_fields.update(prompt_tokens=num_tokens, prompts=len(requests), stream=completion.stream)
        if self.options.log_prompts:
            _log.info({"event": "prompts", "request_id": request.state.request_id, "prompts": completion.prompts})
        return self.engine.outputs(requests, self.options.request_timeout)

    def answered(self, requests: Seq[PromptRequest]) -> None:
        """Record that these requests have an output, or have ended."""
        for each in requests:
            self._unanswered.pop(each.id, None)

    def progress(self, requests: Seq[PromptRequest]) -> dict[str, int]:
        """Return the tokens of these requests' prompts, those of them that are computed, and how many choices of all
        requests wait while none of these is computed."""
        computed = self.llm.engine.scheduler.computed_prompts()
        return {
            "computed": sum(computed.get(each.id, 0) for each in requests),
            "prompt": sum(len(each.prompt_token_ids) for each in requests),
            "waiting": 0 if any(each.id in computed for each in requests) else self.live()["waiting"],
        }

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
        self.metrics.ended(choice.stats, choice.finish_reason, prompt, seconds)
        if self._journal is not None:
            self._journal.answered(output, completion.params, prompt, request.state.category, seconds)
        fields = request.state.log_fields
        stats = choice.stats
        first = seconds - stats.time_total + stats.time_first_token
        for name, more in (
            ("cached_tokens", 0 if choice.index else stats.num_cached_tokens),  # of each prompt once
            ("forwards", stats.num_forwards),
            ("completion_tokens", len(choice.token_ids)),
            ("finish_reasons", [choice.finish_reason]),
            ("draft_tokens", stats.num_draft_tokens),
            ("accepted_tokens", stats.num_accepted_tokens),
        ):
            fields[name] = fields[name] + more if name in fields else more
        fields["first_token_seconds"] = round(min(first, fields.get("first_token_seconds", first)), 4)
        fields["tokens_per_second"] = round(fields["completion_tokens"] / max(seconds, 1e-3), 2)
        fields["tokens_per_step"] = round(fields["completion_tokens"] / max(fields["forwards"], 1), 2)
        fields["speculation"] = stats.speculation
        if self.options.log_prompts:
            _log.info({"event": "answer", "request_id": request.state.request_id, "text": choice.text})

    def live(self) -> dict[str, Any]:
        """Return the current state of the engine."""
        engine = self.llm.engine
        running = len(engine.scheduler.running)
        prompts = {**self._unanswered}
        in_engine = engine.scheduler.computed_prompts()
        computed = sum(in_engine.get(each, 0) for each in prompts)
        return {
            "running": running,
            "waiting": max(self.num_choices - running, 0),
            "max_batch": engine.config.max_batch,
            "prompt_tokens_computed": computed,
            "prompt_tokens_waiting": sum(prompts.values()) - computed,
            "last_step": asdict(engine.last_step),
            "adaptation": None if self.llm.adapting is None else self.llm.adapting.total(),
        }

    def limits(self) -> Mapping[str, str]:
        """Return what this server cannot do -> the reason."""
        llm = self.llm
        reasons = {
            "text": llm.tokenizer is None and "the model has no tokenizer: prompts are token ids",
            "chat": not getattr(llm.tokenizer, "chat_template", None) and "the model has no chat template",
            "tools": not self.texts.carry_calls and "the chat template does not carry them in the known format",
            "response_format": find_spec("llguidance") is None and "only text: llguidance is not installed",
            "exactness": not llm.exact and f"speculation may change the text: {llm.target.exactness.reason}",
            "speculation": llm.drafter is None and "there is no drafter",
        }
        return {name: reason for name, reason in reasons.items() if reason}


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of the work. Raises ClientDisconnect as soon as the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, gone):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
