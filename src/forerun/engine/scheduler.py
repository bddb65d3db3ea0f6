"""Who takes part in the next step: first come, first served, up to max_batch at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from forerun.engine.state import SequenceState


class Scheduler:
    """Waiting and running sequences. A sequence that has begun runs until it finishes."""

    def __init__(self, max_batch: int) -> None:
        self.max_batch = max_batch
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, states: Iterable[SequenceState]) -> None:
        """Put sequences at the end of the queue."""
        self.waiting.extend(states)

    def admit(self) -> None:
        """Move waiting sequences into free places. An interrupt leaves none out: for a moment it is in both."""
        while self.waiting and len(self.running) < self.max_batch:
            state = self.waiting[0]
            if state not in self.running:
                self.running.append(state)
            self.waiting.popleft()

    def find(self, wanted: Callable[[SequenceState], bool]) -> list[SequenceState]:
        """Every waiting or running sequence for which `wanted` holds."""
        return [state for state in (*self.waiting, *self.running) if wanted(state)]

    def remove(self, state: SequenceState) -> None:
        """Take a sequence out, if it is there."""
        if state in self.running:
            self.running.remove(state)
        if state in self.waiting:
            self.waiting.remove(state)
