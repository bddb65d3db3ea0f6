"""Signals that end a process at once: within a block they end it as an exception does, so that it is cleaned up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name)]
"""The last one is Windows': Ctrl-Break, and a window that is closed."""


class _Ending:
    """The signal that ends this process.

    Attributes:
        number: 0 as long as none has come.
        waits: it is not raised yet.
    """

    number = 0
    waits = False

    def receive(self, number: int, frame: FrameType | None) -> None:
        if not self.number:  # a second one does not disturb the cleaning
            self.number = number
            self.check()

    def check(self) -> None:
        if self.number and not self.waits:
            raise SystemExit(128 + self.number)


_ending = _Ending()


@contextmanager
def cleaned_up() -> Iterator[None]:
    """Have SIGTERM, SIGHUP and SIGBREAK raise SystemExit in this block, and end the process by the same one after it.

    Signals come to the main thread alone: in other threads this does nothing, nor where a signal has a handler already
    or is ignored.
    """
    held = [number for number in _ENDING if _is_main() and signal.getsignal(number) is signal.SIG_DFL]
    for number in held:
        signal.signal(number, _ending.receive)
    try:
        yield
    finally:
        for number in held:
            signal.signal(number, signal.SIG_DFL)
        if held and _ending.number:
            signal.raise_signal(_ending.number)


@contextmanager
def held() -> Iterator[None]:
    """Have such a signal raise after this block: what the block makes is known to whoever cleans up."""
    _ending.waits = _is_main()
    try:
        yield
    finally:
        _ending.waits = False
    if _is_main():
        _ending.check()


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
