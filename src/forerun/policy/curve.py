"""Seconds as a function of a count, learned from noisy observations while it is being used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
COST_TOLERANCE = 0.01
"""Relative change of a mean from which the table is computed again."""


class Curve:
    """What something costs by a whole number: rows of a forward, or nodes asked of a drafter.

    Each count seen has a mean of its own, so that steps (kernels that pad) show; between them the shape is
    interpolated, and beyond them it continues the weighted regression line through all of them. Counts never seen are
    estimated a little lower than that, so that they are tried. The estimate never falls as the count rises.
    Observations are clipped, and earlier ones lose weight.

    Args:
        size: counts 0..size - 1; larger ones count as the last.
        flat: the prior for other counts while only one was seen: the same cost and a small slope; False: a cost in
            proportion to the count.
        shape: a curve of the same counts in other circumstances, which has seen two or more: between and beyond the
            counts seen here, this curve has its shape in place of a line's.
    """

    __slots__ = ("_flat", "_form", "_means", "_shape", "_size", "_stale", "_table", "_tabled", "_weights")

    def __init__(self, size: int, flat: bool = True, shape: Curve | None = None) -> None:
        self._size = size
        self._flat = flat
        self._shape = shape
        self._form: Table | None = None  # of the shape, from which the table was computed
        self._means: dict[int, float] = {}
        self._weights: dict[int, float] = {}
        self._tabled: dict[int, float] = {}  # the means of which the table was computed
        self._table: Table = np.zeros(0)
        self._stale = False

    def __bool__(self) -> bool:
        """Whether anything was seen."""
        return bool(self._means)

    @property
    def largest(self) -> int:
        """The largest count seen; 0 if none."""
        return max(self._means, default=0)

    def weight(self, count: int) -> float:
        """Observations of this count, as they are weighted now."""
        return self._weights.get(min(count, self._size - 1), 0.0)

    def add(self, count: int, seconds: float, share: float = 1.0) -> None:
        """One observation. share: its weight; n for the mean of n."""
        count = min(count, self._size - 1)
        mean, weight = self._means.get(count), self._weights.get(count, 0.0)
        if mean is None:
            if self._means:  # the first of a count often includes allocations and the choice of kernels
                seconds = min(seconds, COST_CLIP * float(self.table(count + 1)[count]))
            mean = seconds
        elif weight < COST_CLIP and seconds < mean / COST_CLIP:
            mean, weight = seconds, 0.0  # the few before were the exception
        else:
            seconds = min(max(seconds, mean / COST_CLIP), mean * COST_CLIP)
            mean += share * (seconds - mean) / (weight + share)
        self._means[count] = mean
        self._weights[count] = min(weight + share, COST_MEMORY)
        tabled = self._tabled.get(count)
        if tabled is None or abs(mean - tabled) > COST_TOLERANCE * mean:
            self._stale = True

    def table(self, most: int | None = None) -> Table:
        """[most or more] seconds by count, up to `size`; all if None. Read only."""
        most = self._size if most is None else min(most, self._size)
        form = None
        if self._shape is not None and len(self._shape._means) > 1:
            form = self._shape.table(max(most, min(self._size, self.largest + 2)))
        if self._stale or len(self._table) < most or form is not self._form:
            base = self._line(min(self._size, max(most, self.largest + 2))) if form is None else form
            self._table = self._compute(base, lowered=form is not None)
            self._tabled, self._form = dict(self._means), form
            self._stale = False
        return self._table

    def state(self) -> dict[str, list[float]]:
        """Means and weights by count, as JSON holds them."""
        return {str(x): [mean, self._weights[x]] for x, mean in self._means.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Begin with what `state` once gave, with the weight of a few observations.

        Raises:
            ValueError, TypeError, KeyError, AttributeError, OverflowError: it is something else.
        """
        points = {int(x): (float(mean), float(weight)) for x, (mean, weight) in state.items()}
        if not points:
            raise ValueError("no points")
        for x, (mean, weight) in points.items():
            if not (0 <= x < self._size and 0 < mean < 1e6 and 0 < weight < 1e6):
                raise ValueError(f"{x}: {mean}, {weight}")
        self._means = {x: mean for x, (mean, _) in points.items()}
        self._weights = {x: min(weight, COST_MEMORY / 4) for x, (_, weight) in points.items()}
        self._stale = True

    def take(self, other: Curve) -> None:
        """Learn what another curve has."""
        for count, mean in other._means.items():
            self.add(count, mean, other._weights[count])

    def _compute(self, base: Table, lowered: bool) -> Table:
        """[most] where most is beyond the largest count seen: the table rises from there on by itself.

        Args:
            base: [most], to be bent.
            lowered: counts never seen have been made cheaper in it.
        """
        most = len(base)
        if not self._means:
            return np.zeros(most)
        points = sorted(self._means)
        base = np.maximum(base, 1e-12)
        # between the points the line is bent to go through them; outside it keeps the ratio of the outermost one
        ratios = np.array([self._means[x] for x in points]) / base[points]
        table = base * np.interp(np.arange(most), points, ratios)
        if not lowered:
            seen = table[points]
            table *= COST_OPTIMISM
            table[points] = seen
        # halfway between the smallest rising table above it and the largest below it
        rising = np.maximum.accumulate(table)
        smooth: Table = (rising + np.minimum.accumulate(table[::-1])[::-1]) / 2
        return smooth

    def _line(self, most: int) -> Table:
        """[most] the regression line through the means, rising and positive; zeros without any."""
        if not self._means:
            return np.zeros(most)
        counts = np.arange(most, dtype=np.float64)
        points = [(x, mean, self._weights[x]) for x, mean in self._means.items()]
        if len(points) == 1:
            ((x, mean, _),) = points
            shape: Table = 1 + COST_SLOPE * counts if self._flat else np.maximum(counts, 0.5) / max(x, 0.5)
            return shape * mean
        total = sum(weight for _, _, weight in points)
        centre = sum(weight * x for x, _, weight in points) / total
        middle = sum(weight * mean for _, mean, weight in points) / total
        slope = sum(weight * (x - centre) * (mean - middle) for x, mean, weight in points)
        slope = max(slope / sum(weight * (x - centre) ** 2 for x, _, weight in points), 0.0)
        line: Table = np.maximum(middle + slope * (counts - centre), min(self._means.values()) / 2)
        return line


def clipped_mean(seconds: Sequence[float]) -> float:
    """The mean, where what exceeds the median by the factor COST_CLIP counts as so much."""
    most = COST_CLIP * sorted(seconds)[(len(seconds) - 1) // 2]
    return sum(min(each, most) for each in seconds) / len(seconds)
