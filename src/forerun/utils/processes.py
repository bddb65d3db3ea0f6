"""Processes that this one starts: ended with all that they start, and bounded where the kernel does not bound them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from forerun.utils.deferred import DeferredModule

if TYPE_CHECKING:
    import psutil
else:
    psutil = DeferredModule("psutil")

_UNBOUNDED = ("darwin", "win32")
"""Systems on which no kernel refuses memory to a process: macOS takes no notice of RLIMIT_AS, Windows has none."""
_LOOK_EVERY = 0.02
"""Seconds between two looks at the memory of a process: a processor writes to about 200 MB in them."""


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that was started with `start_new_session`, and what it has started, without waiting for them.

    Windows has no such groups: there, what processes have started that ended before is left.
    """
    if sys.platform == "win32":
        _end_tree(process)
    else:
        with suppress(OSError):  # the group is gone where all of it has left
            os.killpg(process.pid, signal.SIGKILL)


def _end_tree(process: subprocess.Popen[bytes]) -> None:
    started = []
    with suppress(psutil.Error):
        started = psutil.Process(process.pid).children(recursive=True)
    process.kill()  # first, so that it does not go on without them
    for each in started:
        with suppress(psutil.Error):
            each.kill()


@contextmanager
def watched_memory(process: subprocess.Popen[bytes], most: int) -> Iterator[threading.Event]:
    """Kill a process that holds more than `most` bytes of memory within this block, on systems whose kernel does not
    bound it; elsewhere the process does that itself, by `resource`.

    The event is set if it was killed.
    """
    exceeded = threading.Event()
    if sys.platform not in _UNBOUNDED:
        yield exceeded
        return
    is_over = threading.Event()
    watch = threading.Thread(target=_watch, args=(process, most, exceeded, is_over), name="memory", daemon=True)
    watch.start()
    try:
        yield exceeded
    finally:
        is_over.set()
        watch.join()


def _watch(process: subprocess.Popen[bytes], most: int, exceeded: threading.Event, is_over: threading.Event) -> None:
    with suppress(psutil.Error):  # it has ended
        watched = psutil.Process(process.pid)
        while not is_over.wait(_LOOK_EVERY):
            if watched.memory_info().rss > most:
                exceeded.set()
                process.kill()
                return
