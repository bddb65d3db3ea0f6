"""Seconds as a function of a count, learned from noisy observations while it is being used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]

COST_MEMORY = 32.0
"""Largest weight of a mean, in observations: each new one moves it by at least one part in so many."""
COST_CLIP = 3.0
"""An observation further from its mean than this factor counts as this far, so that single slow steps do not last."""
COST_SLOPE = 0.02
"""Prior cost of each further row, as a share of the forward's cost, while only one row count was seen."""
COST_OPTIMISM = 0.97
"""Factor on the estimated costs of counts never seen, so that they are tried."""


class Curve:
    """What something costs by a whole number: rows of a forward, or nodes asked of a drafter.

    Each count seen has a mean of its own, so that steps (kernels that pad) show; between them the shape is
    interpolated, and beyond them it goes on as the straight line through all of them. Counts never seen are thought a
    little cheaper than that, so that they are tried. More never costs less. A single slow step (another process, a
    page fault) is clipped, and forgotten.

    Args:
        size: counts 0..size - 1; larger ones count as the last.
        flat: what is believed of counts beyond while only one was seen: it costs the same, but for a small slope;
            False: it costs in proportion.
    """

    __slots__ = ("_dirty", "_flat", "_mean", "_points", "_table", "_weight")

    def __init__(self, size: int, flat: bool = True) -> None:
        self._mean = np.zeros(size)
        self._weight = np.zeros(size)
        self._points: list[int] = []
        self._flat = flat
        self._table: Table = np.zeros(size)
        self._dirty = False

    def __bool__(self) -> bool:
        """Whether anything was seen."""
        return bool(self._points)

    @property
    def largest(self) -> int:
        """The largest count seen; 0 if none."""
        return self._points[-1] if self._points else 0

    def weight(self, count: int) -> float:
        """Observations of this count that still have a say."""
        return float(self._weight[min(count, len(self._weight) - 1)])

    def add(self, count: int, seconds: float, share: float = 1.0) -> None:
        """One observation. share: how much of one it is worth."""
        count = min(count, len(self._mean) - 1)
        weight, mean = float(self._weight[count]), float(self._mean[count])
        if weight == 0:
            if self._points:  # the first of its kind often pays for memory and kernels of its own
                seconds = min(seconds, COST_CLIP * float(self.table()[count]))
            self._points = sorted([*self._points, count])
            mean = seconds
            self._dirty = True
        elif weight < COST_CLIP and seconds < mean / COST_CLIP:
            mean, weight = seconds, 0.0  # what was seen before was the exception
        else:
            seconds = min(max(seconds, mean / COST_CLIP), mean * COST_CLIP)
            mean += share * (seconds - mean) / (weight + share)
        self._mean[count] = mean
        self._weight[count] = min(weight + share, COST_MEMORY)
        if abs(mean - self._table[count]) > 0.01 * mean:
            self._dirty = True

    def table(self) -> Table:
        """[size] seconds by count. Read only."""
        if self._dirty:
            self._table = self._compute()
            self._dirty = False
        return self._table

    def state(self) -> dict[str, list[float]]:
        """What is worth keeping, as plain numbers."""
        return {str(x): [float(self._mean[x]), float(self._weight[x])] for x in self._points}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Begin with what `state` once gave, worth a few observations.

        Raises:
            ValueError, TypeError, KeyError: it is something else.
        """
        points = {int(x): (float(mean), float(weight)) for x, (mean, weight) in state.items()}
        for x, (mean, weight) in points.items():
            if not (0 <= x < len(self._mean) and 0 < mean < 1e6 and weight > 0):
                raise ValueError(f"{x}: {mean}, {weight}")
        for x, (mean, weight) in points.items():
            self._mean[x], self._weight[x] = mean, min(weight, COST_MEMORY / 4)
        self._points = sorted(points)
        self._dirty = bool(points)

    def _compute(self) -> Table:
        points = np.array(self._points)
        means, weights = self._mean[points], self._weight[points]
        base = np.maximum(self._line(points, means, weights), 1e-12)
        # between the points the line is bent to go through them; outside it keeps the last one's distance
        counts = np.arange(len(self._mean))
        table = base * np.interp(counts, points, means / base[points])
        unseen = np.ones(len(table), bool)
        unseen[points] = False
        table[unseen] *= COST_OPTIMISM
        # halfway between the smallest rising table above it and the largest below it
        rising = np.maximum.accumulate(table)
        smooth: Table = (rising + np.minimum.accumulate(table[::-1])[::-1]) / 2
        return smooth

    def _line(self, points: NDArray[np.int64], means: Table, weights: Table) -> Table:
        """[size] the straight line through the points, rising and positive."""
        counts = np.arange(len(self._mean), dtype=np.float64)
        if len(points) == 1:
            shape: Table = 1 + COST_SLOPE * counts if self._flat else np.maximum(counts, 0.5) / points[0]
            return shape * float(means[0])
        centre, middle = np.average(points, weights=weights), np.average(means, weights=weights)
        offsets = points - centre
        slope = float((weights * offsets * (means - middle)).sum() / (weights * offsets**2).sum())
        slope = max(slope, 0.0)
        line: Table = middle + slope * (counts - centre)
        floored: Table = np.maximum(line, float(means.min()) / 2)
        return floored
