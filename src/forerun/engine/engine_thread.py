"""A thread that drives an engine and hands the outputs of requests to sinks."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from forerun.config import SamplingParams
from forerun.engine.results import StepOutput, StreamChunk
from forerun.engine.sequence import Request
from forerun.engine.thread_safe import SharedEngine
from forerun.errors import EngineClosedError, InterruptedRequestError

_log = logging.getLogger(__name__)

Sink: TypeAlias = Callable[[StepOutput], object]
"""Takes the outputs of one request, one after another."""

_MAX_THREADS = 32
"""Sinks that run at once; a thread is started only when all are busy. More sinks wait."""


class Mailbox:
    """Holds the outputs of one request that its sink has not taken yet.

    Args:
        sink: takes them.
        failed: called once, if the sink raises; it gets no more outputs then.
    """

    __slots__ = ("_failed", "_sink", "busy", "outputs")

    def __init__(self, sink: Sink, failed: Callable[[], None]) -> None:
        self._sink: Sink | None = sink
        self._failed = failed
        self.outputs: deque[StepOutput] = deque()
        self.busy = False  # a thread empties it, or is about to

    def deliver(self, output: StepOutput) -> None:
        """Call the sink, unless it has failed."""
        if self._sink is None:
            return
        try:
            self._sink(output)
        except BaseException:  # the error is the sink's, and this thread serves other sinks
            self._sink = None
            _log.exception("the sink of request %d failed; the request is aborted", output.request_id)
            self._failed()


class Sinks:
    """Hands outputs to sinks in a pool of threads: in order for one request, in parallel for different requests."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="forerun-sink")
        self._changed = threading.Condition()
        self._num_busy = 0

    def put(self, mailbox: Mailbox, output: StepOutput) -> None:
        """Queue an output for a request's sink. Never waits for a sink."""
        with self._changed:
            mailbox.outputs.append(output)
            if mailbox.busy:
                return
            mailbox.busy = True
            self._num_busy += 1
        try:
            self._pool.submit(self._empty, mailbox)
        except RuntimeError:  # the interpreter is about to end, and starts no threads any more
            self._leave(mailbox)

    def wait(self, timeout: float | None) -> bool:
        """Wait until every sink has taken its outputs, at most `timeout` seconds. Return whether all have."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_busy == 0, timeout)

    def close(self) -> None:
        """Take no more outputs; the outputs in mailboxes still reach their sinks."""
        self._pool.shutdown(wait=False)

    def _empty(self, mailbox: Mailbox) -> None:
        while True:
            with self._changed:
                if not mailbox.outputs:
                    self._leave(mailbox)
                    return
                output = mailbox.outputs.popleft()
            mailbox.deliver(output)

    def _leave(self, mailbox: Mailbox) -> None:
        with self._changed:
            mailbox.busy = False
            self._num_busy -= 1
            self._changed.notify_all()


@dataclass(slots=True, eq=False, repr=False)
class _Job:
    """A request between `submit` and its last output.

    Attributes:
        open: the choices that have not ended.
        quick: its sink is called in the engine's thread.
        entered: the engine has it.
    """

    request: Request
    mailbox: Mailbox
    open: set[int]
    quick: bool = False
    entered: bool = False


class EngineThread:
    """Computes requests in a thread of its own, and hands their outputs to sinks.

    All methods may be called from any thread and, but for `drain` and `close`, do not wait for a step. Other threads
    may use the same engine through an `LLM` meanwhile; all requests are computed together.

    A sink is called in another thread, with one output at a time, in order; a `quick` one in the engine's thread. The
    last output of each choice carries `choice` or `error`. A sink that raises ends its request and no other; a slow one
    delays neither steps nor other sinks. Close the thread when it is no longer needed.
    """

    def __init__(self, shared: SharedEngine) -> None:
        self._shared = shared
        self._sinks = Sinks()
        self._changed = threading.Condition()
        self._jobs: dict[int, _Job] = {}
        self._commands: deque[tuple[_Job, bool]] = deque()  # requests that are to enter (True) or to be aborted
        self._accepting, self._closing = True, False
        # of the thread alone
        self._inside: dict[int, _Job] = {}
        self._inbox: deque[StepOutput] = deque()
        self._thread = threading.Thread(target=self._run, name="forerun-engine", daemon=True)
        atexit.register(self.close)  # a thread inside a kernel must not outlive the interpreter
        self._thread.start()

    def __enter__(self) -> EngineThread:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams | None,
        sink: Sink,
        *,
        stream: bool = False,
        quick: bool = False,
    ) -> int:
        """Submit a request and return its id, which its outputs carry. Arguments and errors as `enter`, and:

        Args:
            stream: outputs come as tokens do; else one per choice, at its end.

        Raises:
            PromptError, SamplingError: the request cannot be served.
            DeviceError: the device has failed, and nothing can be computed any more.
        """
        (request,) = self._shared.engine.requests([prompt_token_ids], params, stream=stream)
        self.enter(request, sink, quick=quick)
        return request.id

    def enter(self, request: Request, sink: Sink, *, quick: bool = False) -> None:
        """Submit a request of `Engine.requests`, whatever its size, at once.

        Args:
            quick: the sink never waits and is fast: it is called in the engine's thread between two steps.

        Raises:
            EngineClosedError: no more requests are taken.

        An error with which the engine refuses the request between two steps (QueueFullError) is an output's `error`.
        """
        with self._changed:
            if not self._accepting:
                raise EngineClosedError("The engine takes no more requests: it is about to end, or has ended.")
            mailbox = Mailbox(sink, lambda: self.abort(request.id))
            job = self._jobs[request.id] = _Job(request, mailbox, set(range(request.params.n)), quick)
            self._commands.append((job, True))
        self._notify()

    def abort(self, request_id: int) -> None:
        """Abort a request: its unfinished choices end with the present step, with finish reason "abort".

        Of an id that is unknown or finished it does nothing.
        """
        with self._changed:
            job = self._jobs.get(request_id)
            if job is None:
                return
            self._commands.append((job, False))
        self._notify()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait until all have ended and their sinks have taken the outputs.

        timeout: seconds at most; None: as long as it takes.

        Returns:
            Whether all have ended. Those that have not go on.
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._accepting = False
            if not self._changed.wait_for(lambda: not self._jobs, timeout):
                return False
        return self._sinks.wait(None if end is None else max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """End the thread after the present step. Requests that are not finished end with EngineClosedError.

        The engine stays as it is: an LLM that shares it goes on.
        """
        with self._changed:
            self._accepting, self._closing = False, True
        self._notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self._shared.wake()

    def _has_commands(self) -> bool:
        return bool(self._commands or self._closing)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._inside or self._has_commands())
            if self._closing:
                break
            try:
                self._submit_and_abort()
                if self._inside:
                    self._shared.advance(self._inbox, self._has_commands)
            except BaseException as error:  # of no single request: without this thread, all would wait for ever
                _log.exception("the step failed; all requests of this thread end")
                ended = InterruptedRequestError(
                    "The step that computed this request was interrupted. Send the request again."
                )
                self._end_all(error if isinstance(error, Exception) else ended)
            self._dispatch()
        self._end_all(EngineClosedError("The engine was closed before the request was finished. Send it again."))
        self._sinks.close()

    def _submit_and_abort(self) -> None:
        """Submit new requests to the engine, and abort requests there."""
        while self._commands:
            job, enters = self._commands.popleft()
            if not enters:
                if job.request.id in self._inside:
                    self._shared.abort(job.request.id)
                continue
            try:
                self._shared.add(job.request, [], self._inbox)
            except Exception as error:
                self._end(job, error)
            else:
                self._inside[job.request.id] = job
                job.entered = True

    def _dispatch(self) -> None:
        while self._inbox:
            output = self._inbox.popleft()
            job = self._inside.get(output.request_id)
            if job is not None:
                self._put(job, output)

    def _put(self, job: _Job, output: StepOutput) -> None:
        if output.choice is not None or output.error is not None:
            job.open.discard(output.chunk.index)
        if not job.open and job.entered:
            del self._inside[job.request.id]
            self._shared.forget([job.request.id])
        if job.quick:
            job.mailbox.deliver(output)
        else:
            self._sinks.put(job.mailbox, output)
        if not job.open:
            with self._changed:  # after the sink has it: `drain` looks at the sinks when the last job has gone
                self._jobs.pop(job.request.id, None)
                self._changed.notify_all()

    def _end(self, job: _Job, error: Exception) -> None:
        """End the unfinished choices of a request with this error."""
        for choice in sorted(job.open):
            chunk = StreamChunk("", [], finish_reason="abort", index=choice)
            self._put(job, StepOutput(job.request.id, chunk, error=error))

    def _end_all(self, error: Exception) -> None:
        with self._changed:
            jobs = list(self._jobs.values())
            self._commands.clear()
        for job in jobs:
            self._end(job, error)


class LoopWaker:
    """Sets events of an event loop from other threads, many with one wake-up.

    loop: the running one, unless another is given.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop or asyncio.get_running_loop()
        self._events: deque[asyncio.Event] = deque()
        self._awake = False

    def wake(self, event: asyncio.Event) -> None:
        """Have the loop set an event soon. Never waits."""
        self._events.append(event)
        if not self._awake:  # else it has not looked yet, and will find this
            self._awake = True
            with suppress(RuntimeError):  # the loop has ended, and no task waits any more
                self.loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        self._awake = False
        while self._events:
            self._events.popleft().set()
