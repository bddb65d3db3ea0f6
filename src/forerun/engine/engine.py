"""The engine: it takes requests, runs steps, and gives outputs. A sequence that leaves gives its memory back."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Hashable, Sequence as Seq
from dataclasses import replace
from time import perf_counter
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from forerun import verification
from forerun.config import EngineConfig, SamplingParams
from forerun.drafters import Drafter
from forerun.drafters.validation import check_drafter
from forerun.engine.kv_cache_manager import KVCacheManager, bound_memory
from forerun.engine.request_checks import check_end, check_prompt, checked, naming_prompt, special_stops
from forerun.engine.results import StepOutput, StepStats
from forerun.engine.sequence import Request, SequenceState, new_state
from forerun.engine.step import StepLoop
from forerun.engine.text import NO_STOPS, StopStrings, TokenTexts
from forerun.errors import ConfigError, DeviceError, InterruptedRequestError
from forerun.models import LanguageModel
from forerun.sampling import SequenceConstraint
from forerun.sampling.grammar import Grammars
from forerun.sampling.json_schemas import ALL_HELD
from forerun.speculation import SpeculationPolicy
from forerun.types import Constraint

if TYPE_CHECKING:
    from forerun.drafters.lookup.remembered.remembered_text import RememberedText

# Ctrl-C waits until a step is done, so that no state is left half written.


class HeldInterrupts:
    """Delays SIGINT until the end of a context; a second SIGINT in the meantime is handled at once.

    Signals come to the main thread alone: in other threads, and inside another such context, this does nothing. It does
    nothing either where SIGINT has no handler in Python, since then it ends the process or is ignored.

    Attributes:
        pending: SIGINT has come; code that runs several steps in one context leaves it after the present one.
    """

    _handler: Any = None
    pending = False

    def __enter__(self) -> HeldInterrupts:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler) and not isinstance(getattr(handler, "__self__", None), HeldInterrupts):
                self._handler = handler
                signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        handler, self._handler = self._handler, None
        if handler is None:
            return
        signal.signal(signal.SIGINT, handler)
        if self.pending:
            self.pending = False
            handler(signal.SIGINT, None)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if not self.pending:
            self.pending = True
        elif self._handler is not None:
            self.pending = False
            self._handler(number, frame)


class Engine:
    """Runs any number of requests together, one step at a time. Not thread-safe: one thread drives it.

    A step takes every running sequence one forward further: a chunk of its prompt, or a draft verified.
    An exception inside one sequence ends that sequence, and its output carries the exception; other sequences continue.

    Args:
        policy: decides how much is drafted, and keeps the drafter at K = 0; None: as `config` says.
        bounds_memory: bound the pools of target and drafter (`bound_memory`); False: that is done, or is to be.
        clock: seconds, by which the scheduler learns how long steps take.
        remembered: keeps the answers, and is closed with the engine; `LLM` opens it.

    Attributes:
        outputs: the outputs of the steps, until the caller takes them from the front.
        scheduler: the sequences, waiting and running.
        faults: whether the device has failed, so that nothing can be computed any more.
        memory: the sequences' caches.
        remembered: the answers of the past; None: none are kept.
        grammars: the requests' grammars, prepared. Preparing takes up to a second, and any thread may do it before.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None = None,
        *,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        policy: SpeculationPolicy | None = None,
        bounds_memory: bool = True,
        clock: Callable[[], float] = perf_counter,
        remembered: RememberedText | None = None,
    ) -> None:
        if drafter is not None:
            check_drafter(drafter)
        self.target = target
        self.drafter = drafter
        self.config = config or EngineConfig()
        if self.config.remember is not None and remembered is None:
            raise ConfigError(
                f"remember is {self.config.remember!r}, but Engine opens no file of answers. Give LLM(remember=...)."
            )
        if self.config.acceptance is not None:
            verification.check_acceptance(self.config.acceptance)
        self.tokenizer = tokenizer
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self.grammars = Grammars(tokenizer, target.name, target.vocab_size)
        if bounds_memory:
            bound_memory(target, drafter, self.config)
        self.memory = KVCacheManager(target, self.config)
        # K = 0 is plain decoding, without the drafter. An explicit policy decides for itself, and keeps the drafter.
        drafting = drafter if self.config.num_draft_tokens or policy is not None else None
        self._loop = StepLoop(target, drafting, self.config, policy, self.memory, self._texts, clock, remembered)
        self.remembered = remembered
        self.scheduler, self.outputs, self.faults = self._loop.scheduler, self._loop.outputs, self._loop.faults
        self._ids = itertools.count()
        self._ending: list[SequenceState] = []  # sequences that are to leave before they are finished

    @property
    def last_step(self) -> StepStats:
        """Return the figures of the last step."""
        return self._loop.last_step

    @property
    def has_work(self) -> bool:
        """Return whether another step would do anything."""
        return bool(len(self.scheduler) or self.outputs or self._loop.under_way or self._ending)

    def add(self, prompt_token_ids: list[int], params: SamplingParams | None = None, *, stream: bool = False) -> int:
        """Queue a request and return its id. Arguments as `requests`. Raises as `requests` and `enqueue`."""
        (request,) = self.requests([prompt_token_ids], params, stream=stream)
        self.enqueue(request)
        return request.id

    def requests(
        self,
        prompts: Seq[Seq[int]],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        flow: Hashable = None,
    ) -> list[Request]:
        """Check prompts with the same options, and make a request of each. Any thread may call this, at any time.

        Args:
            prompts: [n] token ids of each, 1 <= n < context length.
            params: options; the defaults if None.
            stream: outputs carry text as it arrives, not only at the end.
            flow: what these requests have in common with no others; None: their tenant.

        Raises:
            PromptError: a prompt is empty, too long, or holds ids outside the vocabulary.
            SamplingError, GrammarError: an option does not fit this model, the grammar cannot be followed, or no token
                may end an answer that it completes.
            DeviceError: the device has failed.
        """
        self.faults.check()
        target = self.target
        params = checked(params, target, self.tokenizer, self.drafter, self.grammars)
        reasons: dict[int, int | str] = {token_id: token_id for token_id in params.stop_token_ids}
        marks: dict[int, str] = {}
        if params.stop or not params.skip_special_tokens:
            params, reasons, marks = self._marked(params, reasons)
        eos_ids = frozenset() if params.ignore_eos else target.eos_token_ids
        reasons = {token_id: reason for token_id, reason in reasons.items() if token_id not in eos_ids}
        stops = StopStrings(params.stop) if params.stop else NO_STOPS
        unheld = ALL_HELD if params.grammar is None else self.grammars.unheld(params.grammar, params.tenant)
        stop_ids = eos_ids.union(reasons)
        check_end(params, stop_ids, target)
        made = []
        for index, prompt in enumerate(prompts):
            with naming_prompt(index, len(prompts)):
                check_prompt(prompt, target)
            made.append(
                Request(
                    next(self._ids),
                    list(prompt),
                    params,
                    stream,
                    stop_ids,
                    stops,
                    params.tenant if flow is None else flow,
                    scope=params.tenant,
                    marks=marks,
                    stop_reasons=reasons,
                    unheld=unheld,
                )
            )
        return made

    def _marked(
        self, params: SamplingParams, reasons: dict[int, int | str]
    ) -> tuple[SamplingParams, dict[int, int | str], dict[int, str]]:
        """Add the special tokens that stop strings write to `reasons`, id -> what is told where it ends a text.

        Returns:
            The options with those ids, the reasons, and id -> the text that stands for a special token in the output.
        """
        marks: dict[int, str] = {}
        special = {} if self._texts is None else self._texts.special
        if params.stop:
            stopping = special_stops(params, special, self.target)
            reasons = {**stopping, **reasons}
            params = replace(params, stop_token_ids=tuple(reasons))
            marks = stopping if params.include_stop_str_in_output else {}
        if not params.skip_special_tokens:
            marks = {token_id: text for text, token_id in special.items()}
        return params, reasons, marks

    def enqueue(self, request: Request) -> None:
        """Queue a request of `requests`.

        Raises:
            QueueFullError: `max_queue` sequences wait already.
            DeviceError: the device has failed.
        """
        self.faults.check()
        params, target = request.params, self.target
        constraints: list[Constraint | None] = [None] * params.n
        if params.grammar is not None:
            new_matcher = self.grammars.prepare(params.grammar, params.tenant)
            constraints = [
                SequenceConstraint(new_matcher, request.stop_ids, target.vocab_size) for _ in range(params.n)
            ]
        states = [
            new_state(request, choice, next(self._ids), target.context_length, self._texts, constraint)
            for choice, constraint in enumerate(constraints)
        ]
        self.scheduler.add(states)

    def step(self) -> list[StepOutput]:
        """Take every running sequence one forward further, and return the outputs.

        SIGINT is held back until the step is done. After any other interrupt every sequence is rolled back to where it
        was before the step, or ended with an error; the next call returns what had been finished.
        """
        self.advance()
        outputs = list(self.outputs)
        self.outputs.clear()
        return outputs

    def advance(self) -> None:
        """Run one step, and add its outputs to `outputs`, from which the caller takes them."""
        with HeldInterrupts():
            if self._loop.under_way or self._ending:
                self._recover()
            try:
                self._loop.run()
            except Exception as error:
                error = self.faults.own(error)
                if not self._loop.under_way:  # no sequence's fault: it would come again, and no request would report it
                    raise error
                self._recover(error)
            except BaseException:
                self._recover()
                raise
            if self.faults.failure is not None:
                for state in list(self.scheduler):
                    self._loop.fail(state, DeviceError(self.faults.failure))

    def abort(self, request_id: int) -> None:
        """End a request's unfinished choices with finish reason "abort"; the next step's outputs hold them."""
        with HeldInterrupts():
            self._recover()
            for state in [state for state in self.scheduler if state.request.id == request_id]:
                state.sequence.finish_reason = "abort"
                self._ending.append(state)
            self._recover()

    def close(self) -> None:
        """Free everything; unfinished requests are forgotten."""
        with HeldInterrupts():
            for state in (*self._loop.under_way, *self._ending, *self.scheduler):
                self._loop.release(state)
                self.scheduler.remove(state)
            self._loop.under_way, self._ending = [], []
            self.outputs.clear()
        self.memory.close()
        if self.remembered is not None:
            self.remembered.close()

    def _recover(self, error: Exception | None = None) -> None:
        """End the sequences that are to end. After an interrupted step, roll its sequences back, or end them, first.

        If this is interrupted, the next call completes it.

        Args:
            error: what cut the step short, and ends all of its sequences; None: an interrupt.
        """
        if self._loop.under_way:
            for state in self._loop.under_way:
                self._loop.stop(state)
                if state.error is None and (error is not None or state.changing):
                    state.error = error or InterruptedRequestError(
                        "The step that computed this request was interrupted while tokens were committed. Send the "
                        "request again."
                    )
            self._loop.reset()
            self.memory.recount()
            for state in self._loop.under_way:
                if state.error is not None or state.has_left:
                    self._ending.append(state)
                else:
                    self._rollback(state)
            self._loop.under_way = []
        for state in self._ending:
            self._loop.end(state)
        self._ending = []

    def _rollback(self, state: SequenceState) -> None:
        """Continue from the last commit: the interrupted step's, if it came to that, or the one before."""
        try:
            if state.cache is not None:
                state.cache.drop()
                if state.cache.length:
                    self._loop.start(state)
                else:  # its layers may be half allocated: it is started again in the next step
                    self._loop.release(state)
            self._loop.deliver(state)
        except Exception as error:
            self._loop.fail(state, error)
