"""How far an audit has come, and until when each of its stages may go on."""

from __future__ import annotations

import math
from time import perf_counter
from typing import Protocol


class Listener(Protocol):
    """Receives reports of progress."""

    def say(self, text: str, more: str) -> None:
        """Report that a stage begins. more: its count and the time left."""

    def tick(self, seconds: float, count: str) -> None:
        """Report how much of the stage is done, so many seconds after the beginning."""


class Pace:
    """Shares the time out among the stages of an audit: what one of them leaves over, the later ones have.

    A stage whose time is up begins nothing more and ends what it has begun, so that no answer is left out for its
    length.

    Args:
        seconds: for all stages; infinite where nothing limits them.
        weight: of all stages together.
    """

    def __init__(self, seconds: float = math.inf, watcher: Listener | None = None, weight: float = 1.0) -> None:
        self._began = self._from = perf_counter()
        self._end = self._until = self._began + seconds
        self._watcher = watcher
        self.weight = weight
        self._total = 0

    @property
    def is_limited(self) -> bool:
        """Return whether the time is."""
        return self._end < math.inf

    @property
    def is_over(self) -> bool:
        """Return whether the stage's time is up."""
        return self.is_past(1)

    def is_past(self, share: float) -> bool:
        """Return whether this share of the stage's time is over."""
        return self.is_limited and perf_counter() >= self._from + share * (self._until - self._from)

    def begin(self, text: str, total: int = 0, weight: float = 1.0) -> None:
        """Begin a stage of so many requests or samples."""
        self._from = perf_counter()
        left = self._end - self._from
        if self.is_limited:
            self._until = self._end - left * (1 - weight / max(self.weight, weight))
        self.weight -= weight
        self._total = total
        if self._watcher is not None:
            count = f", {total}" if total else ""
            self._watcher.say(text, count + (f"; {max(left, 0):.0f} s left" if self.is_limited else ""))
            self.advance(0)

    def advance(self, done: int) -> None:
        """Report how much of the stage is done."""
        if self._watcher is not None:
            self._watcher.tick(perf_counter() - self._began, f"{done}/{self._total}" if self._total else "")


def in_time(done: int, total: int) -> str:
    """Return a note on what was left out since the time was up; empty if nothing was."""
    return "" if done >= total else f"the time was up after {done} of {total}"
