"""How things are timed and compared: interleaved rounds, medians and bootstrap intervals.

Machines drift: clocks change, neighbours come and go. Methods are therefore run in turn, round after round, and
compared within a round; a ratio is the median of the rounds' ratios, never a ratio of two separate averages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from forerun.errors import ConfigError
from forerun.utils.json_file import Fields

T = TypeVar("T")
Key = TypeVar("Key")

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """What one run returned, and the wall-clock seconds it took."""

    seconds: float
    value: T


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and the bounds of its bootstrap interval (LEVEL of the resampled medians lie inside).

    A single value has no interval: the bounds are None.
    """

    median: float
    low: float | None
    high: float | None

    def __format__(self, spec: str) -> str:
        """Format as `f"{interval:.2f}"`: "1.53 [1.49, 1.58]", and "1.53 [–]" without bounds."""
        if self.low is None or self.high is None:
            return f"{self.median:{spec}} [–]"
        return f"{self.median:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def timed(run: Callable[[], T]) -> Timed[T]:
    """Run once and time it."""
    start = time.perf_counter()
    value = run()
    return Timed(time.perf_counter() - start, value)


def interleave(
    methods: Mapping[Key, Callable[[], T]],
    rounds: int,
    warmup: int = 1,
    after: Callable[[Key, Timed[T]], None] = lambda *_: None,
) -> dict[Key, list[Timed[T]]]:
    """Run every method once per round, in the order given, and return its timed runs, one per round.

    Warm-up rounds come first and are thrown away. `after` is called, outside the timing, after every run that counts.
    """
    for _ in range(warmup):
        for run in methods.values():
            run()
    runs: dict[Key, list[Timed[T]]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, run in methods.items():
            runs[name].append(timed(run))
            after(name, runs[name][-1])
    return runs


def bootstrap(values: Sequence[float], resamples: int = RESAMPLES, level: float = LEVEL, seed: int = 0) -> Interval:
    """Return the median of the values and its percentile bootstrap interval (Efron 1979); deterministic."""
    sample = np.asarray(values, dtype=np.float64)
    if sample.size == 0:
        raise ValueError("No values to take a median of.")
    if sample.size == 1:
        return Interval(float(sample[0]), None, None)
    generator = np.random.default_rng(seed)
    drawn = generator.integers(0, sample.size, size=(resamples, sample.size))
    medians = np.median(sample[drawn], axis=1)
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(np.median(sample)), float(low), float(high))


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
    """Return median and interval of numerator[i] / denominator[i], where entry i of both is of the same round."""
    return bootstrap([a / b for a, b in zip(numerator, denominator, strict=True)])


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values lie; NaN if there are none."""
    return float(np.quantile(values, share)) if len(values) else float("nan")


PADDED_NOTE = "Cost-padded model: the text and the acceptance of a smaller one, at the cost of one of this size."
"""Goes with every figure measured on such a model."""


def is_cost_padded(model: str | Path) -> bool:
    """Return whether the folder says that it was made by `python -m tools.toys padded`."""
    try:
        config = Fields.read(Path(model) / "config.json", ConfigError)
    except ConfigError:
        return False
    return bool(config.values.get("forerun_cost_padded"))
