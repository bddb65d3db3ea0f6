"""When something may be tried that is not thought best."""

from __future__ import annotations

PROBE_SHARE = 0.01
"""Share of the time that probes may cost."""
PROBE_STEPS = 8
"""Fewest steps between two probes."""


class Probes:
    """An account of time: every step pays a small share of itself in, a probe is bought with what it will lose.

    So probing never costs more than that share of the time, however slow what is probed, and what costs next to
    nothing is probed often.
    """

    __slots__ = ("_balance", "_since")

    def __init__(self) -> None:
        self._balance = 0.0
        self._since = 0

    def earn(self, seconds: float) -> None:
        """A step was made."""
        self._balance += PROBE_SHARE * seconds
        self._since += 1

    @property
    def due(self) -> bool:
        """Whether it is long enough since the last one."""
        return self._since >= PROBE_STEPS

    def buy(self, loss: float) -> bool:
        """Whether a probe that loses so many seconds may be made now; it then has been paid for."""
        if self._balance < loss:
            self._since -= PROBE_STEPS // 2  # not asked again at every step
            return False
        self._balance -= max(loss, 0.0)
        self._since = 0
        return True
