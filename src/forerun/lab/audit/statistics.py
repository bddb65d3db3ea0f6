"""G-tests of counts against known probabilities and against other counts, what they would find, and distances.

scipy's chi-square distributions, central and noncentral; everything else is a few sums.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from importlib import import_module
from math import inf, log, sqrt
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forerun.errors import ConfigError

Numbers: TypeAlias = NDArray[np.float64]

LEAST_EXPECTED = 10.0
"""Samples that a cell expects at least: from there on, the statistic has chi-square's tail (as simulated, to 1e-5)."""
FOUND = 0.9
"""The probability of detection for which powers are stated."""


@dataclass(frozen=True, slots=True)
class GTest:
    """The outcome of one test.

    Attributes:
        statistic: G with Williams' correction; infinite where something impossible was seen.
        freedom: degrees of freedom.
        num_samples: of all strata.
    """

    statistic: float
    freedom: int
    num_samples: int

    @property
    def p_value(self) -> float:
        """Return the probability of such a statistic, or a larger one, if nothing is wrong."""
        if self.freedom == 0:
            return 0.0 if self.statistic == inf else 1.0
        return float(_scipy().chi2.sf(self.statistic, self.freedom))

    def __add__(self, other: GTest) -> GTest:
        """Combine two independent strata."""
        return GTest(
            self.statistic + other.statistic, self.freedom + other.freedom, self.num_samples + other.num_samples
        )


NOTHING = GTest(0.0, 0, 0)


def g_test(counts: Seq[float] | Numbers, probabilities: Seq[float] | Numbers, least: float = LEAST_EXPECTED) -> GTest:
    """Test counts [C] against the probabilities [C] of their cells; cells that expect too few samples are merged.

    Args:
        least: samples that a cell expects at least.
    """
    seen = np.asarray(counts, np.float64)
    cells = np.asarray(probabilities, np.float64)
    cells = cells / cells.sum()
    total = float(seen.sum())
    if total == 0:
        return NOTHING
    if seen[cells == 0].any():
        return GTest(inf, max(int((cells > 0).sum()) - 1, 0), int(total))
    seen, expected = _merged(seen, cells * total, least)
    freedom = len(expected) - 1
    if freedom < 1:
        return GTest(0.0, 0, int(total))
    correction = 1 + (float((total / expected).sum()) - 1) / (6 * total * freedom)
    return GTest(_g(seen, expected) / correction, freedom, int(total))


def homogeneity(first: Seq[float] | Numbers, second: Seq[float] | Numbers, least: float = LEAST_EXPECTED) -> GTest:
    """Test whether two samples [C] come from one unknown distribution; cells with too few samples are merged.

    The order of the cells must not depend on which of the samples they are seen in.

    Its num_samples is that of one sample which, against known probabilities, would see as much.
    """
    both = np.stack([np.asarray(first, np.float64), np.asarray(second, np.float64)])
    totals = both.sum(1)
    if not totals.min() > 0:
        return NOTHING
    equivalent = int(totals.prod() / totals.sum())
    shares = totals / totals.sum()
    pooled, _ = _merged(both, both.sum(0) * shares.min(), least)
    freedom = pooled.shape[1] - 1
    if freedom < 1:
        return GTest(0.0, 0, equivalent)
    expected = shares[:, None] * pooled.sum(0)
    total = float(totals.sum())
    correction = 1 + ((total / totals).sum() - 1) * ((total / pooled.sum(0)).sum() - 1) / (6 * total * freedom)
    return GTest(_g(pooled, expected) / correction, freedom, equivalent)


def power(num_samples: float, freedom: int, level: float, distance: float) -> float:
    """Return a lower bound of the probability that a test at this level finds a total variation of `distance`.

    At least: the chi-square distance of n samples is n * sum((p' - p)^2 / p), which by Cauchy and Schwarz is no less
    than 4 * n * distance^2, whatever the cells.
    """
    stats = _scipy()
    return float(stats.ncx2.sf(stats.chi2.isf(level, freedom), freedom, 4 * num_samples * distance**2))


def detectable(num_samples: float, freedom: int, level: float, probability: float = FOUND) -> float:
    """Return the smallest total variation that is found with this probability; 1 where none is."""
    if freedom < 1 or num_samples <= 0:
        return 1.0
    if power(num_samples, freedom, level, 1.0) < probability:
        return 1.0
    return float(
        _scipy("optimize").brentq(lambda each: power(num_samples, freedom, level, each) - probability, 0.0, 1.0)
    )


def share_found(num_trials: int, probability: float = FOUND) -> float:
    """Return the smallest share of wrong trials of which one is among `num_trials` with this probability."""
    return 1 - (1 - probability) ** (1 / num_trials) if num_trials else 1.0


@dataclass(frozen=True, slots=True)
class Deviation:
    """A measured total variation between what was sampled and what should have been.

    Attributes:
        seen: between the counts' shares and the probabilities; noise alone makes it positive.
        low, high: bounds of the distributions' distance, right in at least 95 of 100 cases.
    """

    seen: float
    low: float
    high: float


def deviation(counts: Seq[float] | Numbers, probabilities: Seq[float] | Numbers) -> Deviation:
    """Measure how far the counts' distribution is from the probabilities, with bounds; cells are merged as in `g_test`,
    and those of probability 0 are one.

    Both bounds are McDiarmid's inequality: one sample moves the distance by at most 1/n, and its expectation lies
    between the true distance and that plus half the sum of the cells' standard errors.
    """
    seen = np.asarray(counts, np.float64)
    cells = np.asarray(probabilities, np.float64)
    total = float(seen.sum())
    if total == 0:
        return Deviation(0.0, 0.0, 1.0)
    cells = cells / cells.sum()
    impossible = float(seen[cells == 0].sum())
    seen, expected = _merged(seen, cells * total, LEAST_EXPECTED)
    shares = np.append(seen, impossible) / total
    cells = np.append(expected, 0.0) / total
    distance = float(np.abs(shares - cells).sum()) / 2
    spread = float(np.sqrt(shares * (1 - shares) / total).sum()) / 2
    slack = sqrt(log(2 / 0.05) / (2 * total))
    return Deviation(distance, max(0.0, distance - spread - slack), min(1.0, distance + slack))


def more_often(first: tuple[int, int], second: tuple[int, int]) -> float:
    """Return the p-value of Fisher's exact test that the second of two counts (events, trials) is the larger share."""
    table = [[second[0], second[1] - second[0]], [first[0], first[1] - first[0]]]
    return float(_scipy().fisher_exact(table, alternative="greater").pvalue)


def _g(seen: Numbers, expected: Numbers) -> float:
    positive = seen > 0
    return 2 * float((seen[positive] * np.log(seen[positive] / expected[positive])).sum())


def _merged(seen: Numbers, expected: Numbers, least: float) -> tuple[Numbers, Numbers]:
    """Merge cells (the last dimension) that expect too few with the next such ones; the remainder joins the smallest
    cell."""
    keep = expected >= least
    groups: list[list[int]] = [[index] for index in np.flatnonzero(keep).tolist()]
    waiting: list[int] = []
    for index in np.flatnonzero(~keep & (expected > 0)).tolist():
        waiting.append(index)
        if expected[waiting].sum() >= least:
            groups.append(waiting)
            waiting = []
    if waiting and groups:
        min(groups, key=lambda group: float(expected[group].sum())).extend(waiting)
    elif waiting:
        groups.append(waiting)
    merged = [seen[..., group].sum(-1) for group in groups]
    return np.stack(merged, axis=-1), np.array([float(expected[group].sum()) for group in groups])


def _scipy(module: str = "stats") -> Any:
    try:
        return import_module(f"scipy.{module}")
    except ModuleNotFoundError:
        raise ConfigError(
            "An audit needs scipy for its probabilities, which is not installed: pip install 'forerun[audit]'"
        ) from None
