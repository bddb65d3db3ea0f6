"""The engine: requests in, steps, results out. Whatever leaves gives back its memory, errors included."""

from __future__ import annotations

import itertools
import logging
from time import perf_counter
from typing import Any

import torch

from forerun.config import EngineConfig, SamplingParams
from forerun.drafters import Drafter
from forerun.engine.checks import check_request, encode_prediction, with_special_stops
from forerun.engine.results import Choice, StepOutput, StreamChunk
from forerun.engine.scheduler import Scheduler
from forerun.engine.state import Request, SequenceState
from forerun.engine.stats import StepStats
from forerun.engine.step import StepLoop
from forerun.engine.text import TextStream, TokenTexts
from forerun.models import LanguageModel
from forerun.policy import Budget
from forerun.types import Sequence
from forerun.verify import check_acceptance

_log = logging.getLogger(__name__)


class Engine:
    """Runs any number of requests together, one step at a time. Not thread-safe: one thread drives it.

    A step takes every running sequence one forward further: a chunk of its prompt, or a draft verified.
    An exception inside one sequence ends that sequence, and its output carries the exception; others go on.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None = None,
        *,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.config = config or EngineConfig()
        if self.config.acceptance is not None:
            check_acceptance(self.config.acceptance)
        self.tokenizer = tokenizer
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self.scheduler = Scheduler(self.config.max_batch)
        self.last_step = StepStats()
        # K = 0 is plain decoding: a drafter that is never asked need not be told anything either. An explicit budget
        # decides for itself, and keeps the drafter.
        self._drafter = drafter if self.config.num_draft_tokens or budget is not None else None
        self._loop = StepLoop(target, self._drafter, self.config, budget)
        self._ids = itertools.count()
        self._outputs: list[StepOutput] = []

    @property
    def has_work(self) -> bool:
        """Whether another step would do anything."""
        return len(self.scheduler) > 0 or bool(self._outputs)

    def add(self, prompt_token_ids: list[int], params: SamplingParams | None = None, *, stream: bool = False) -> int:
        """Queue a request; its id. Each of its `n` choices computes the prompt for itself.

        Args:
            prompt_token_ids: [n], 1 <= n < context length.
            params: options; the defaults if None.
            stream: outputs carry text as it arrives, not only at the end.

        Raises:
            PromptError: the prompt is empty, too long, or holds ids outside the vocabulary.
            SamplingError: an option does not fit this model.
        """
        params = params or SamplingParams()
        check_request(prompt_token_ids, params, self.target, self.tokenizer)
        params = with_special_stops(params, {} if self._texts is None else self._texts.special, self.target)
        prediction = encode_prediction(params, self.target, self.tokenizer, self.drafter)
        eos = frozenset() if params.ignore_eos else self.target.eos_token_ids
        request = Request(
            next(self._ids), list(prompt_token_ids), params, stream, eos | frozenset(params.stop_token_ids), prediction
        )
        self.scheduler.add([self._new_state(request, choice) for choice in range(params.n)])
        return request.id

    def step(self) -> list[StepOutput]:
        """Take every running sequence one forward further; what came of it."""
        started = perf_counter()
        for state in self.scheduler.admit():
            self._enter(state, started)
        batch = self.scheduler.running
        if batch:
            with torch.inference_mode():
                self.last_step = stats = self._run(list(batch))
            stats.time_total = perf_counter() - started
        outputs, self._outputs = self._outputs, []
        return outputs

    def abort(self, request_id: int) -> None:
        """End a request's unfinished choices with finish reason "abort"; the next step's outputs hold them."""
        for state in self.scheduler.remove(lambda state: state.request.id == request_id):
            state.sequence.finish_reason = "abort"
            self._leave(state)
            self._finish(state, StreamChunk("", [], index=state.sequence.choice))

    def close(self) -> None:
        """Free everything; unfinished requests are forgotten."""
        for state in self.scheduler.remove(lambda _: True):
            self._leave(state)
        self._outputs = []

    def _new_state(self, request: Request, choice: int) -> SequenceState:
        params, prompt = request.params, request.prompt_token_ids
        max_length = min(len(prompt) + params.max_tokens, self.target.context_length)
        sequence = Sequence(next(self._ids), list(prompt), len(prompt), params, choice, max_length)
        sequence.prediction = request.prediction
        state = SequenceState(request, sequence, self._loop.argmax_suffices(params))
        if self._texts is not None and (request.stream or params.stop):
            state.text = TextStream(self._texts, prompt, params.stop)
        if params.logprobs is not None:
            state.logprobs = []
        if params.prompt_logprobs is not None and choice == 0:
            state.prompt_logprobs = [None]
        return state

    def _enter(self, state: SequenceState, now: float) -> None:
        state.time_started = now
        try:
            state.cache = state.sequence.cache = self.target.new_cache()
            self._loop.start(state)
        except Exception as error:
            self._fail(state, error)

    def _run(self, batch: list[SequenceState]) -> StepStats:
        """One step of these sequences. If it fails for all, each is tried alone: only the guilty ends."""
        stats = StepStats()
        started = perf_counter()
        try:
            work = self._loop.compute(batch, stats)
        except Exception as error:
            for state in batch:
                if state.cache is not None:
                    state.cache.drop()
            if len(batch) == 1:
                self._fail(batch[0], error)
            else:
                for state in batch:
                    stats = self._run([state])
            return stats
        done = []
        for item in work:
            try:
                chunk = self._loop.apply(item, stats)
            except Exception as error:
                self._fail(item.state, error)
            else:
                done.append((item, chunk))
        failed = self._loop.tell_drafter([item for item, _ in done], stats)
        known = stats.time_draft + stats.time_target + stats.time_verify
        self._loop.observe([item for item, _ in done], stats, perf_counter() - started - known)
        for item, _ in done:
            own = item.state.stats
            own.time_draft += stats.time_draft
            own.time_target += stats.time_target
            own.time_verify += stats.time_verify
        for item, chunk in done:
            if item.state in failed:
                self._fail(item.state, failed[item.state])
            elif chunk is not None:
                self._deliver(item.state, chunk)
        return stats

    def _deliver(self, state: SequenceState, chunk: StreamChunk) -> None:
        if state.sequence.finish_reason is None:
            if state.request.stream:
                self._outputs.append(StepOutput(state.request.id, _shown(state, chunk)))
            return
        self.scheduler.running.remove(state)
        self._leave(state)
        self._finish(state, chunk)

    def _finish(self, state: SequenceState, chunk: StreamChunk) -> None:
        """Put the choice, which has left, among the outputs; or the error of a tokenizer that cannot decode it."""
        try:
            self._outputs.append(self._result(state, chunk))
        except Exception as error:
            self._outputs.append(_failure(state, error))

    def _result(self, state: SequenceState, chunk: StreamChunk) -> StepOutput:
        chunk.finish_reason, chunk.stats = state.sequence.finish_reason, state.stats
        prompt_logprobs = state.prompt_logprobs if state.sequence.choice == 0 else None
        if state.text is not None and state.sequence.finish_reason == "abort":
            state.text.finish()
        if state.time_started:
            state.stats.time_total = perf_counter() - state.time_started
        choice = self._choice(state)
        return StepOutput(state.request.id, _shown(state, chunk), choice, prompt_logprobs)

    def _choice(self, state: SequenceState) -> Choice:
        if state.text is not None:
            return state.choice(state.text.text)
        if self._texts is None:
            return state.choice("")
        output = state.sequence.output_ids
        if output and state.sequence.finish_reason == "stop":
            output.pop()
        text = TextStream(self._texts, state.request.prompt_token_ids)
        text.push(output)
        text.finish()
        return state.choice(text.text)

    def _fail(self, state: SequenceState, error: Exception) -> None:
        self.scheduler.remove(lambda other: other is state)
        state.sequence.finish_reason = "abort"
        self._leave(state)
        self._outputs.append(_failure(state, error))

    def _leave(self, state: SequenceState) -> None:
        """Free what the sequence holds. Runs once per sequence, whatever happened before."""
        try:
            self._loop.stop(state)
        except Exception:
            # the sequence is gone either way, and its own result or error matters more
            _log.exception("the drafter failed to let sequence %d go", state.sequence.id)
        finally:
            if state.cache is not None:
                state.cache.free()
                state.cache = state.sequence.cache = None


def _shown(state: SequenceState, chunk: StreamChunk) -> StreamChunk:
    if state.text is not None and state.request.stream:
        chunk.text = state.text.take()
    return chunk


def _failure(state: SequenceState, error: Exception) -> StepOutput:
    chunk = StreamChunk("", [], finish_reason="abort", index=state.sequence.choice, stats=state.stats)
    return StepOutput(state.request.id, chunk, error=error)
