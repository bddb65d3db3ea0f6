"""What a step costs by what it does, learned while it is done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from forerun.config import MAX_NUM_DRAFT_TOKENS
from forerun.policy.curve import COST_CLIP, COST_MEMORY, Curve, Table

COST_SIZE = 1025
"""Rows of a forward, up to which their number changes its estimated cost."""
COST_PACE = 0.1
"""Power of the ratio of measured over expected seconds by which the machine's pace moves."""
COST_TRUSTED = 4.0
"""Observations of a row count before its steps move the pace."""


class CostModel:
    """Seconds of a step's parts: the target by rows, batch and context, the drafter by nodes asked of it.

    Two things move all costs together and must not be mistaken for a difference between choices: the context grows,
    and the machine is now faster, now slower. Context has a slope of its own; the machine has a pace, by which every
    observation is divided before it is learned.
    """

    def __init__(self) -> None:
        self._target: dict[tuple[str, int], Curve] = {}
        self._draft: dict[int, Curve] = {}
        self._idle = Curve(1)
        self._context: dict[tuple[str, int], float] = {}
        self._slope = _Slope()
        self._pace = 1.0

    def target(self, kind: str, batch: int, context: int, most: int = COST_SIZE) -> Table | None:
        """[most at most] seconds by rows of a step without prompt chunks; None if no such step was seen.

        Args:
            kind: of requests, "greedy" or "drawn": what logits cost after the forward depends on it.
            batch: sequences.
            context: positions in their caches, summed.
            most: row counts that are of interest.
        """
        key = _nearest(self._target, (kind, bucket(batch)))
        if key is None:
            return None
        table = self._target[key].table()[:most] * self._pace
        return np.maximum(table + self._slope.value * (context - self._context[key]), table / 4)

    def seen_rows(self, kind: str, batch: int, rows: int) -> float:
        """How often a step of so many rows was seen, of late."""
        curve = self._target.get((kind, bucket(batch)))
        return 0.0 if curve is None else curve.weight(rounded(rows))

    def draft(self, batch: int, places: int) -> Table:
        """[places + 1] seconds in the drafter by the largest budget of `batch` sequences.

        At 0 it is not asked, and the cost is that of being told what happened. Nothing before anything was seen.
        """
        key = min(self._draft, key=lambda own: abs(own - bucket(batch)), default=None)
        table = np.zeros(places + 1) if key is None else self._draft[key].table()[: places + 1] * self._pace
        table[0] = self._idle.table()[0] * self._pace
        return table

    @property
    def largest_draft(self) -> int:
        """The largest budget that was tried."""
        return max((curve.largest for curve in self._draft.values()), default=0)

    def add_target(self, kind: str, batch: int, context: int, rows: int, seconds: float) -> None:
        """A step without prompt chunks has been computed: forward, verdicts and what the engine did besides."""
        key, rows = (kind, bucket(batch)), rounded(rows)
        curve = self._target.get(key)
        if curve is None:
            curve = self._target[key] = Curve(COST_SIZE)
            self._context[key] = context
        if curve.weight(rows) >= COST_TRUSTED:
            extra = self._slope.value * (context - self._context[key])
            expected = max(float(curve.table()[rows]) * self._pace + extra, 1e-9)
            surprise = seconds / expected
            self._pace *= min(max(surprise, 1 / COST_CLIP), COST_CLIP) ** COST_PACE
            self._slope.add(context - self._context[key], (seconds - expected) / self._pace)
        own = seconds / self._pace - self._slope.value * (context - self._context[key])
        curve.add(rows, max(own, seconds / self._pace / 4))

    def add_draft(self, batch: int, budget: int, seconds: float, share: float = 1.0) -> None:
        """A drafter has been asked for at most `budget` nodes of each of `batch` sequences."""
        curve = self._draft.setdefault(bucket(batch), Curve(MAX_NUM_DRAFT_TOKENS + 1, flat=False))
        curve.add(budget, seconds / self._pace, share)

    def add_idle(self, seconds: float) -> None:
        """A step has passed in which the drafter was not asked; it was told what happened."""
        self._idle.add(0, seconds / self._pace)

    def state(self) -> dict[str, Any]:
        """All of it as plain numbers, for the next process."""
        return {
            "target": [[*key, self._context[key], curve.state()] for key, curve in self._target.items() if curve],
            "draft": [[key, curve.state()] for key, curve in self._draft.items() if curve],
            "slope": self._slope.value,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Begin with what `state` once gave. Raises ValueError, TypeError or KeyError if it is something else."""
        target: dict[tuple[str, int], Curve] = {}
        context: dict[tuple[str, int], float] = {}
        draft: dict[int, Curve] = {}
        for kind, batch, positions, points in state["target"]:
            curve = target[str(kind), int(batch)] = Curve(COST_SIZE)
            curve.restore(points)
            context[str(kind), int(batch)] = float(positions)
        for batch, points in state["draft"]:
            draft[int(batch)] = Curve(MAX_NUM_DRAFT_TOKENS + 1, flat=False)
            draft[int(batch)].restore(points)
        slope = _Slope(max(0.0, float(state["slope"])))
        self._target, self._context, self._draft, self._slope = target, context, draft, slope


class _Slope:
    """Seconds per position of context, from how surprises go with the distance from where a curve was measured."""

    __slots__ = ("_xx", "value")

    def __init__(self, value: float = 0.0) -> None:
        self.value = value
        self._xx = 0.0

    def add(self, distance: float, surprise: float) -> None:
        if distance == 0:
            return
        self._xx = self._xx * (1 - 1 / COST_MEMORY) + distance * distance
        self.value = max(0.0, self.value + distance * surprise / (self._xx + COST_MEMORY * distance * distance))


def bucket(batch: int) -> int:
    """Batches that share a curve: each alone up to 4, then four to every doubling."""
    if batch <= 4:
        return batch
    step = 1 << (batch.bit_length() - 3)
    return (batch + step - 1) // step * step


def rounded(rows: int) -> int:
    """Rows that share a mean: each alone up to 16, then eight to every doubling."""
    step = 1 << max(0, rows.bit_length() - 4)
    return min((rows + step // 2) // step * step, COST_SIZE - 1)


def _nearest(known: Mapping[tuple[str, int], Curve], wanted: tuple[str, int]) -> tuple[str, int] | None:
    """The key whose curve to ask: its own if it has any, else that of the batch most like it."""
    if known.get(wanted):
        return wanted
    return min(
        (key for key, curve in known.items() if curve),
        key=lambda key: (key[0] != wanted[0], abs(key[1] - wanted[1])),
        default=None,
    )
