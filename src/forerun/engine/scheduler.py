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

    def admit(self) -> list[SequenceState]:
        """Move waiting sequences into free places; those that moved."""
        admitted: list[SequenceState] = []
        while self.waiting and len(self.running) < self.max_batch:
            admitted.append(self.waiting.popleft())
            self.running.append(admitted[-1])
        return admitted

    def remove(self, leaves: Callable[[SequenceState], bool]) -> list[SequenceState]:
        """Take out every waiting or running sequence for which `leaves` holds; those taken."""
        taken = [state for state in (*self.waiting, *self.running) if leaves(state)]
        if taken:
            self.waiting = deque(state for state in self.waiting if not leaves(state))
            self.running = [state for state in self.running if not leaves(state)]
        return taken
