"""Outputs handed to their requests' sinks, in threads of their own: no sink holds up a step, or another sink."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from forerun.engine.results import StepOutput

_log = logging.getLogger(__name__)

Sink: TypeAlias = Callable[[StepOutput], object]
"""Takes the outputs of one request, one after another."""

_MAX_THREADS = 32
"""Sinks that run at once; a thread is started only when all others are busy. More sinks wait for one that ends."""


class Mailbox:
    """The outputs of one request that its sink has not taken yet.

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
        except BaseException:  # whatever it is, it is the sink's, and this thread goes on to others
            self._sink = None
            _log.exception("the sink of request %d failed; the request is aborted", output.request_id)
            self._failed()


class Sinks:
    """Hands outputs to sinks: those of one request in order, those of different requests side by side."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="forerun-sink")
        self._changed = threading.Condition()
        self._num_busy = 0

    def put(self, mailbox: Mailbox, output: StepOutput) -> None:
        """Hand over an output; never waits for a sink."""
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
        """Wait until every sink has taken what there is, for so many seconds at most; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_busy == 0, timeout)

    def close(self) -> None:
        """Take no more outputs; what there is still reaches its sinks."""
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
