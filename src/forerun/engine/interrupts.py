"""Ctrl-C waits until a step is done, so that no state is left half written."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


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
