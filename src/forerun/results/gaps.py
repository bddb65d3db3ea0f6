"""Times as counts by class: small in a file, and those of several runs add up.

Class i holds times from SMALLEST * 10^(i / PER_DECADE) on, up to where class i + 1 begins: 12 % wide.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

SMALLEST = 1e-5
"""Seconds at which class 0 begins; shorter times are counted there."""
PER_DECADE = 20


def counted(seconds: Iterable[float]) -> dict[int, int]:
    """Class -> how many of the times fall into it, by rising class."""
    counts = Counter(
        max(0, math.floor(PER_DECADE * math.log10(each / SMALLEST))) if each > SMALLEST else 0 for each in seconds
    )
    return dict(sorted(counts.items()))


def added(parts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """The counts of several together."""
    total: Counter[int] = Counter()
    for part in parts:
        total.update(part)
    return dict(sorted(total.items()))


def edge(index: float) -> float:
    """Seconds at which a class begins."""
    return float(SMALLEST * 10 ** (index / PER_DECADE))


def quantile(counts: Mapping[int, int], share: float) -> float:
    """The time below which that share lies, linear in the logarithm within a class; NaN if there are none."""
    left = share * sum(counts.values())
    for index, count in sorted(counts.items()):
        if left <= count:
            return edge(index + left / count)
        left -= count
    return math.nan
