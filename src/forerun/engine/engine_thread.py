"""A thread that drives an engine and hands the outputs of requests to sinks."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from forerun.engine.results import StepOutput, StreamChunk
from forerun.engine.sequence import Request
from forerun.engine.thread_safe import SharedEngine
from forerun.errors import EngineClosedError, InterruptedRequestError
from forerun.utils.files import Closing

_log = logging.getLogger(__name__)

Sink: TypeAlias = Callable[[StepOutput], object]
"""Takes the outputs of one request, one after another, between two steps: it is fast, and never waits."""


@dataclass(slots=True, eq=False, repr=False)
class _Job:
    """A request between `enter` and its last output.

    Attributes:
        sink: None if it has failed.
        open: the choices that have not ended.
        entered: the engine has it.
    """

    request: Request
    sink: Sink | None
    open: set[int]
    entered: bool = False


class EngineThread(Closing):
    """Computes requests in a thread of its own, and hands their outputs to sinks.

    All methods may be called from any thread and, but for `drain` and `close`, do not wait for a step. Other threads
    may use the same engine through an `LLM` meanwhile; all requests are computed together.

    A sink is called in this thread, with one output at a time, in order. The last output of each choice carries
    `choice` or `error`. A sink that raises ends its request and no other. Close the thread when it is no longer needed.
    """

    def __init__(self, shared: SharedEngine) -> None:
        self._shared = shared
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

    def enter(self, request: Request, sink: Sink) -> None:
        """Submit a request of `Engine.requests`, whatever its size, at once.

        Raises:
            EngineClosedError: no more requests are taken.

        An error with which the engine refuses the request between two steps (QueueFullError) is an output's `error`.
        """
        with self._changed:
            if not self._accepting:
                raise EngineClosedError("The engine takes no more requests: it is about to end, or has ended.")
            job = self._jobs[request.id] = _Job(request, sink, set(range(request.params.n)))
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
        """Take no more requests, and wait until all have ended.

        timeout: seconds at most; None: as long as it takes.

        Returns:
            Whether all have ended. Those that have not go on.
        """
        with self._changed:
            self._accepting = False
            return self._changed.wait_for(lambda: not self._jobs, timeout)

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
        if job.sink is not None:
            try:
                job.sink(output)
            except BaseException:  # the error is the sink's, and this thread serves other sinks
                job.sink = None
                _log.exception("the sink of request %d failed; the request is aborted", output.request_id)
                self.abort(job.request.id)
        if not job.open:
            with self._changed:
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
