"""The engine: it takes requests, runs steps, and gives outputs. A sequence that leaves gives its memory back."""

from __future__ import annotations

import itertools
import signal
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence as Seq
from time import perf_counter
from types import FrameType, TracebackType
from typing import Any

import torch

from forerun.config import EngineConfig, Grammar, SamplingParams
from forerun.drafters import Drafter
from forerun.drafters.validation import check_drafter
from forerun.engine.kv_cache_manager import KVCacheManager
from forerun.engine.request_checks import check_prompt, checked, naming_prompt, with_special_stops
from forerun.engine.results import StepOutput
from forerun.engine.scheduler import Schedule, Scheduler
from forerun.engine.sequence import Request, SequenceState, new_state
from forerun.engine.stats import StepStats
from forerun.engine.step import StepLoop
from forerun.engine.text import NO_STOPS, StopStrings, TokenTexts
from forerun.errors import DeviceError, GrammarError, InterruptedRequestError
from forerun.models import LanguageModel
from forerun.sampling import SequenceConstraint
from forerun.sampling.grammar.compile import Grammars
from forerun.speculation import SpeculationPolicy
from forerun.types import Constraint
from forerun.utils.device import DeviceFaults
from forerun.verification import check_acceptance

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
        clock: seconds, by which the scheduler learns how long steps take.

    Attributes:
        outputs: the outputs of the steps, until the caller takes them from the front.
        last_step: figures of the last step.
        faults: whether the device has failed, so that nothing can be computed any more.
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
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        if drafter is not None:
            check_drafter(drafter)
        self.target = target
        self.drafter = drafter
        self._clock = clock
        self.config = config or EngineConfig()
        if self.config.acceptance is not None:
            check_acceptance(self.config.acceptance)
        self.tokenizer = tokenizer
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self.grammars = Grammars(tokenizer, target.name, target.vocab_size)
        self._memory = KVCacheManager(target, drafter, self.config)
        self.scheduler = Scheduler(self.config, target, self._memory)
        self.last_step = StepStats()
        # K = 0 is plain decoding, without the drafter. An explicit policy decides for itself, and keeps the drafter.
        self._drafter = drafter if self.config.num_draft_tokens or policy is not None else None
        self._loop = StepLoop(target, self._drafter, self.config, policy)
        self._ids = itertools.count()
        self.faults = DeviceFaults(target.device)
        self.outputs: deque[StepOutput] = deque()
        self._under_way: list[SequenceState] = []  # the sequences of the present step; after it, of one cut short
        self._ending: list[SequenceState] = []  # sequences that are to leave before they are finished

    @property
    def has_work(self) -> bool:
        """Return whether another step would do anything."""
        return bool(len(self.scheduler) or self.outputs or self._under_way or self._ending)

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
            PromptError: a prompt is empty, too long, or holds ids outside the vocabulary; or its keys and values
                would not fit into memory.
            SamplingError, GrammarError: an option does not fit this model, or the grammar cannot be followed.
            DeviceError: the device has failed.
        """
        self.faults.check()
        target = self.target
        params = checked(params, target, self.tokenizer, self.drafter, self.grammars)
        if params.stop and self._texts is not None:
            params = with_special_stops(params, self._texts.special, target)
        stop_ids = (frozenset() if params.ignore_eos else target.eos_token_ids) | frozenset(params.stop_token_ids)
        flow = params.tenant if flow is None else flow
        stops = StopStrings(params.stop) if params.stop else NO_STOPS
        made = []
        for index, prompt in enumerate(prompts):
            with naming_prompt(index, len(prompts)):
                check_prompt(prompt, target)
                self._memory.check(len(prompt), params)
            made.append(Request(next(self._ids), list(prompt), params, stream, stop_ids, stops, flow))
        return made

    def enqueue(self, request: Request) -> None:
        """Queue a request of `requests`.

        Raises:
            QueueFullError: `max_queue` sequences wait already.
            DeviceError: the device has failed.
            GrammarError: no token may end an answer that the grammar completes.
        """
        self.faults.check()
        params, target = request.params, self.target
        constraints: list[Constraint | None] = [None] * params.n
        if params.grammar is not None:
            constraints = _constraints(request, params.grammar, self.grammars, target)
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
            if self._under_way or self._ending:
                self._recover()
            try:
                self._advance(perf_counter())
            except Exception as error:
                error = self.faults.own(error)
                if not self._under_way:  # no sequence's fault: it would come again, and no request would report it
                    raise error
                self._recover(error)
            except BaseException:
                self._recover()
                raise
            if self.faults.failure is not None:
                for state in list(self.scheduler):
                    self._fail(state, DeviceError(self.faults.failure))

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
            for state in (*self._under_way, *self._ending, *self.scheduler):
                self._release(state)
                self.scheduler.remove(state)
            self._under_way, self._ending = [], []
            self.outputs.clear()

    def _advance(self, now: float) -> None:
        scheduler, started = self.scheduler, self._clock()
        self._under_way = list(scheduler.running)
        while (state := scheduler.preempted()) is not None:
            self._preempt(state)
        scheduler.admit()
        self._under_way = list(scheduler.running)
        for state in self._under_way:
            if state.cache is None:
                state.time_started = state.time_started or now
                try:
                    self._memory.begin(state)
                    self._loop.start(state)
                except Exception as error:
                    self._fail(state, error)
        if scheduler.running:
            schedule = scheduler.plan(self._loop.policy)
            if schedule.undrafted or schedule.drafting:
                with torch.inference_mode():
                    self.last_step = stats = self._run(schedule)
                stats.time_total = self._clock() - started
                scheduler.share.observe(stats)
            else:  # other caches hold the pages of the target's pool, perhaps for ever
                for state in list(scheduler.running):
                    self._fail(state, self._memory.shortage())
        self._under_way = []

    def _preempt(self, state: SequenceState) -> None:
        """Free the memory of a running sequence, and put it back into the queue."""
        self._release(state)
        if state.wants_prompt_logprobs:
            state.prompt_logprobs = [None]
        state.stats.num_preemptions += 1
        self.scheduler.requeue(state)

    def _run(self, schedule: Schedule) -> StepStats:
        """Run one step of these sequences. If it fails for all, run each alone: only the cause of the error ends."""
        stats = StepStats()
        started = perf_counter()
        try:
            work = self._loop.compute(schedule, stats)
        except Exception as error:
            return self._run_each_alone(schedule, self.faults.own(error))
        done = []
        for item in work:
            state = item.state
            try:
                state.changing = True
                chunk = self._loop.apply(item, stats)
                state.pending, state.changing = chunk, False
                if not state.prompt_is_shared and chunk is not None:
                    self._memory.publish(state)
                    self.scheduler.prompt_computed(state)
                    state.prompt_is_shared = True
            except Exception as error:
                self._fail(state, error)
            else:
                done.append(item)
        failed = self._loop.update_drafter(done, stats)
        known = stats.time_draft + stats.time_target + stats.time_verify
        self._loop.observe(done, stats, perf_counter() - started - known)
        for item in done:
            own = item.state.stats
            own.time_draft += stats.time_draft
            own.time_target += stats.time_target
            own.time_verify += stats.time_verify
            if item.state in failed:
                self._fail(item.state, failed[item.state])
            else:
                self._deliver(item.state)
        return stats

    def _run_each_alone(self, schedule: Schedule, error: Exception) -> StepStats:
        """Run a step that has failed for all of these sequences again, each alone, unless the device has failed."""
        states = schedule.states
        for state in states:
            if state.cache is not None:
                state.cache.drop()
        stats = StepStats()
        if len(states) == 1 or self.faults.failure is not None:
            for state in states:
                self._fail(state, error)
        else:
            for alone in schedule.split():
                stats.add(self._run(alone))
        return stats

    def _recover(self, error: Exception | None = None) -> None:
        """End the sequences that are to end. After an interrupted step, roll its sequences back, or end them, first.

        If this is interrupted, the next call completes it.

        Args:
            error: what cut the step short, and ends all of its sequences; None: an interrupt.
        """
        if self._under_way:
            for state in self._under_way:
                self._loop.stop(state)
                if state.error is None and (error is not None or state.changing):
                    state.error = error or InterruptedRequestError(
                        "The step that computed this request was interrupted while tokens were committed. Send the "
                        "request again."
                    )
            self._loop.reset()
            self._memory.recount()
            for state in self._under_way:
                if state.error is not None or state.has_left:
                    self._ending.append(state)
                else:
                    self._rollback(state)
            self._under_way = []
        for state in self._ending:
            self._end(state)
        self._ending = []

    # These methods may be interrupted and called again.

    def _deliver(self, state: SequenceState) -> None:
        """Add what the step has committed to the outputs; end a sequence that is finished."""
        chunk = state.pending
        if chunk is None:
            return
        state.changing = True
        if state.sequence.finish_reason is not None:
            self._end(state)
            return
        if state.request.stream:
            if state.text is not None:
                chunk.text = state.text.take()
            self.outputs.append(StepOutput(state.request.id, chunk))
        state.pending, state.changing = None, False

    def _fail(self, state: SequenceState, error: Exception) -> None:
        """End the sequence with this error, or with the device's error behind it."""
        state.error, state.sequence.finish_reason = self.faults.own(error), "abort"
        self._end(state)

    def _rollback(self, state: SequenceState) -> None:
        """Continue from the last commit: the interrupted step's, if it came to that, or the one before."""
        try:
            if state.cache is not None:
                state.cache.drop()
                if state.cache.length:
                    self._loop.start(state)
                else:  # its layers may be half allocated: it is started again in the next step
                    self._release(state)
            self._deliver(state)
        except Exception as error:
            self._fail(state, error)

    def _end(self, state: SequenceState) -> None:
        """Free all that the sequence holds, and then add its result or error to the outputs, once."""
        self._release(state)
        self.scheduler.remove(state)
        if state.has_left:
            return
        try:
            output = state.result(self._texts) if state.error is None else state.failure(state.error)
        except Exception as error:  # of a tokenizer that cannot decode it
            output = state.failure(error)
        # in one line, between whose parts no interrupt can come
        state.has_left = self.outputs.append(output) is None  # type: ignore[func-returns-value]

    def _release(self, state: SequenceState) -> None:
        """Free all that the sequence holds; its published pages stay adoptable."""
        self._memory.publish(state)
        self._loop.stop(state)
        if state.cache is not None:
            state.cache.free()
            state.cache = state.sequence.cache = None


def _constraints(
    request: Request, grammar: Grammar, grammars: Grammars, target: LanguageModel
) -> list[Constraint | None]:
    """Make one constraint for each choice of a request with this grammar.

    Raises:
        GrammarError: the grammar cannot be followed, or no token may end an answer that it completes.
    """
    if not request.stop_ids:
        raise GrammarError(
            f"No token ends an answer: {target.name} has none, or ignore_eos is set. Leave ignore_eos out, or give "
            "stop_token_ids, so that an answer can end where its grammar does."
        )
    new_matcher = grammars.prepare(grammar, request.params.tenant)
    return [SequenceConstraint(new_matcher, request.stop_ids, target.vocab_size) for _ in range(request.params.n)]
