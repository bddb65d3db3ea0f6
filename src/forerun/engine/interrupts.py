"""Ctrl-C waits until a step is done, so that nothing is left half written."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class HeldInterrupts:
    """A context at whose end SIGINT is handled; a second one that comes meanwhile is handled at once.

    Signals come to the main thread alone: in others, and inside another such context, this does nothing. It does
    nothing either where SIGINT has no handler in Python, since then it ends the process or is ignored.
    """

    __slots__ = ("_handler", "_pending")

    def __init__(self) -> None:
        self._handler: Any = None
        self._pending = False

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler) or isinstance(getattr(handler, "__self__", None), HeldInterrupts):
            return
        self._handler = handler
        signal.signal(signal.SIGINT, self._hold)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        handler, self._handler = self._handler, None
        if handler is None:
            return
        signal.signal(signal.SIGINT, handler)
        if self._pending:
            self._pending = False
            handler(signal.SIGINT, None)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if not self._pending:
            self._pending = True
        elif self._handler is not None:
            self._pending = False
            self._handler(number, frame)
