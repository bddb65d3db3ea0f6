"""A rank ends when the process that started it does, whatever it is doing."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import NoReturn

LOST = 70
"""Exit code of a process whose group has broken."""
_GRACE = 2.0
"""Seconds in which the main thread may find out by itself, and end with a message."""
_INTERVAL = 0.5


def end_with_pipe(descriptor: int = 0) -> None:
    """End this process soon after the other end of a pipe is closed, which the system does when its owner ends."""

    def wait() -> None:
        while os.read(descriptor, 1):
            pass
        _end("The process that started this rank has ended.")

    threading.Thread(target=wait, name="forerun-launcher", daemon=True).start()


def end_with_parent(what: str = "launcher") -> None:
    """End this process soon after its parent has ended."""
    parent = os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(_INTERVAL)
        _end(f"The {what} (process {parent}) has ended.")

    threading.Thread(target=wait, name="forerun-launcher", daemon=True).start()


def _end(message: str) -> None:
    time.sleep(_GRACE)
    leave(message)


def leave(message: str, code: int = LOST) -> NoReturn:
    """End this process now, threads and kernels that are under way included."""
    try:
        print(f"error: {message}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)
