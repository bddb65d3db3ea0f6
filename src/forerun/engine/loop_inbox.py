"""Outputs from the engine's thread to an event loop: one wake-up for all that a step has given."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any


class LoopInbox:
    """Calls functions in an event loop, in the order in which any thread has put them, many with one wake-up.

    loop: the running one, unless another is given.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self._calls: deque[tuple[Callable[[Any], object], Any]] = deque()
        self._awake = False

    def put(self, take: Callable[[Any], object], value: Any) -> None:
        """Let the loop call take(value) soon. Never waits."""
        self._calls.append((take, value))
        if not self._awake:  # else it has not looked yet, and will find this
            self._awake = True
            try:
                self._loop.call_soon_threadsafe(self._empty)
            except RuntimeError:  # the loop has ended, and with it whoever would have waited
                self._calls.clear()

    def _empty(self) -> None:
        self._awake = False
        calls = self._calls
        while calls:
            take, value = calls.popleft()
            take(value)
