"""Memory that requests have freed goes back to the system.

The C library keeps it for later, in an arena for each of several threads: after two thousand requests a process holds
a fifth more than it uses. Giving it back takes milliseconds.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

_EVERY = 30.0
"""Seconds between two times: what is given back has to be asked for again."""


class FreedMemory:
    """Gives memory back now and then, if there was anything to do since the last time."""

    def __init__(self) -> None:
        self._give_back = _trim()
        self._last = time.monotonic()
        self._used = False

    def due(self, num_active: int) -> bool:
        """Whether it is time. num_active: requests that are there."""
        self._used |= num_active > 0
        if self._give_back is None or not self._used or time.monotonic() < self._last + _EVERY:
            return False
        self._last, self._used = time.monotonic(), num_active > 0
        return True

    def give_back(self) -> None:
        """Give back what is not used. It takes milliseconds, so not in a thread that others wait for."""
        if self._give_back is not None:
            self._give_back(0)


def _trim() -> Callable[[int], int] | None:
    """glibc's `malloc_trim`; None where there is another C library."""
    try:
        found = ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):
        return None
    found.argtypes, found.restype = [ctypes.c_size_t], ctypes.c_int
    made: Callable[[int], int] = found
    return made
