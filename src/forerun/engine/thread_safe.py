"""An engine that any number of threads share."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager

from forerun.engine.engine import Engine, HeldInterrupts
from forerun.engine.results import StepOutput
from forerun.engine.sequence import Request

_WAIT_SECONDS = 1.0
"""Seconds after which a thread that waits looks again by itself."""


class SharedEngine:
    """Runs the requests of several threads in one engine, and gives each thread the outputs of its requests.

    Of the threads that wait for outputs, one steps the engine, for all; so requests of different threads are computed
    together. A request that enters waits for the end of the present step at most.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inboxes: dict[int, deque[StepOutput]] = {}
        self._open: dict[int, set[int]] = {}  # by request, the choices whose last output has not been delivered
        self._discarded: deque[StepOutput] = deque(maxlen=0)
        self._forgotten: deque[int] = deque()
        self._condition = threading.Condition()
        self._driver: int | None = None  # the thread that steps
        self._entering: set[object] = set()  # threads that wait for the engine between two steps

    def add(self, request: Request, ids: list[int], inbox: deque[StepOutput] | None = None) -> None:
        """Queue a request, like `Engine.enqueue`, between two steps.

        Args:
            ids: gets the request's id too, since an interrupt can keep it from being returned: the caller forgets them.
            inbox: where the outputs go, for `advance`, perhaps those of several requests; None: for `take`.
        """
        with HeldInterrupts(), self._between_steps():
            self.engine.enqueue(request)
            ids.append(request.id)
            self._inboxes[request.id] = deque() if inbox is None else inbox
            self._open[request.id] = set(range(request.params.n))

    def take(self, request_id: int) -> list[StepOutput]:
        """Return the request's outputs since the last call, at least one. Steps the engine for them, or waits."""
        inbox = self._inboxes[request_id]
        while not inbox:
            with HeldInterrupts() as held:
                while self._drive(inbox) and not (inbox or held.pending):
                    pass
            if not inbox:
                self._wait(inbox)
        return [inbox.popleft() for _ in range(len(inbox))]

    def advance(self, inbox: deque[StepOutput], woken: Callable[[], bool]) -> None:
        """Run one step; while another thread steps, wait for outputs to this inbox, or for `woken` after `wake`.

        It may return before there is anything in the inbox.
        """
        if not self._drive(inbox):
            self._wait(inbox, woken)

    def wake(self) -> None:
        """Have a thread that waits in `advance` check `woken` again."""
        with self._condition:
            self._condition.notify_all()

    def abort(self, request_id: int) -> None:
        """Abort a request, like `Engine.abort`: the outputs of unfinished choices come with the next step."""
        with HeldInterrupts(), self._between_steps():
            self.engine.abort(request_id)

    def forget(self, request_ids: Seq[int]) -> None:
        """Drop these requests, finished or not. Never waits, since a garbage collector may call it."""
        with HeldInterrupts():
            for request_id in request_ids:
                self._inboxes.pop(request_id, None)  # there is none yet where the request's entry was interrupted
                if self._open.pop(request_id, True):
                    self._forgotten.append(request_id)
            with self._condition:
                if self._forgotten and self._driver is None and not self._entering:
                    self._abort_forgotten()

    def _drive(self, inbox: deque[StepOutput]) -> bool:
        """Run one step, unless another thread steps or waits to enter. Return whether there was one."""
        me = threading.get_ident()
        try:
            with self._condition:
                if inbox or self._driver not in (None, me) or self._entering:
                    return False
                self._driver = me
            outputs = self.engine.outputs
            try:
                self.engine.advance()
            finally:
                while outputs:
                    first = outputs[0]
                    if first.choice is not None or first.error is not None:
                        self._open.get(first.request_id, set()).discard(first.chunk.index)
                    self._inboxes.get(first.request_id, self._discarded).append(outputs.popleft())
            if not inbox and not self.engine.has_work:
                raise RuntimeError("a request was lost by the engine")
            return True
        finally:
            with self._condition:
                if self._driver == me:
                    if self._forgotten:
                        self._abort_forgotten()
                    self._driver = None
                    self._condition.notify_all()

    def _wait(self, inbox: deque[StepOutput], woken: Callable[[], bool] = lambda: False) -> None:
        """Wait until there are outputs, or the engine is free."""
        with self._condition:
            self._condition.wait_for(
                lambda: inbox or woken() or (self._driver is None and not self._entering), _WAIT_SECONDS
            )

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Hold the engine between two steps."""
        ticket = object()
        with self._condition:
            try:
                self._entering.add(ticket)
                while self._driver not in (None, threading.get_ident()):
                    self._condition.wait(_WAIT_SECONDS)
                yield
            finally:
                self._entering.discard(ticket)
                self._condition.notify_all()

    def _abort_forgotten(self) -> None:
        while self._forgotten:
            self.engine.abort(self._forgotten[0])
            self._forgotten.popleft()
