"""Sequences that wait for a place: by priority, and among equals fair to tenants."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from forerun.engine.state import SequenceState

Line = dict[str | None, deque[SequenceState]]
"""By tenant, those that wait, first come first."""


class WaitingQueue:
    """Who is next: the highest priority; of these, whoever had a place before and lost it; then the tenant that has
    been given least (start-time fair queueing: Goyal, Vin and Cheng, 1996), first come first.

    What a sequence is given is the tokens of its prompt and the most that it may write. Requests without a tenant are
    one tenant's.
    """

    def __init__(self) -> None:
        self._lines: dict[int, Line] = {}  # by priority
        self._resuming: dict[int, deque[SequenceState]] = {}
        self._given: dict[str | None, float] = {}  # tokens, since the queue was last empty
        self._level = 0.0  # what the last tenant served had been given before

    def __len__(self) -> int:  # counted anew: an interrupt may come between a queue and its count
        lines = sum([len(states) for line in self._lines.values() for states in line.values()])
        return lines + sum(map(len, self._resuming.values()))

    def __iter__(self) -> Iterator[SequenceState]:
        for resuming in self._resuming.values():
            yield from resuming
        for line in self._lines.values():
            for states in line.values():
                yield from states

    def push(self, state: SequenceState) -> None:
        """Put a sequence behind its tenant's others."""
        params = state.request.params
        states = self._lines.setdefault(params.priority, {}).setdefault(params.tenant, deque())
        # who comes anew has no claim to what others were given in the meantime
        self._given[params.tenant] = max(self._given.get(params.tenant, 0.0), self._level)
        states.append(state)

    def push_back(self, state: SequenceState) -> None:
        """Put a sequence before all others of its priority, unless it is there already."""
        resuming = self._resuming.setdefault(state.request.params.priority, deque())
        if state not in resuming:
            resuming.appendleft(state)

    @property
    def first(self) -> SequenceState | None:
        """Who is next."""
        for priority in sorted({*self._resuming, *self._lines}, reverse=True):
            if resuming := self._resuming.get(priority):
                return resuming[0]
            line = {tenant: states for tenant, states in self._lines.get(priority, {}).items() if states}
            if line:
                return line[min(line, key=lambda tenant: self._given.get(tenant, 0.0))][0]
        return None

    def take(self, state: SequenceState) -> None:
        """Remove a sequence that gets a place."""
        params = state.request.params
        if state not in self._resuming.get(params.priority, ()):
            self._level = self._given.get(params.tenant, 0.0)
            self._given[params.tenant] = self._level + state.sequence.max_length
        self.remove(state)

    def remove(self, state: SequenceState) -> None:
        """Remove a sequence, if it is there."""
        params = state.request.params
        resuming = self._resuming.get(params.priority)
        if resuming is not None and state in resuming:
            resuming.remove(state)
            if not resuming:
                del self._resuming[params.priority]
            return
        line = self._lines.get(params.priority, {})
        states = line.get(params.tenant)
        if states is None or state not in states:
            return
        states.remove(state)
        if not states:
            del line[params.tenant]
            if not line:
                del self._lines[params.priority]
        if not self._lines and not self._resuming:
            self._given, self._level = {}, 0.0
