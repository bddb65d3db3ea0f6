"""Ratios of paired seconds, with intervals that hold for few pairs too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from forerun.bench.measure import LEVEL, Interval


def ratio_of_sums(numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
    """Sum of the numerators over sum of the denominators, entry by entry of one pair, with Student's interval of the
    linearised logarithm of the ratio. So each pair counts by its seconds, as it does in a day's work. The logarithm,
    since a few prompts that gain very much widen an interval upwards: they are no reason to doubt that there is a gain.
    One pair alone has no interval."""
    count, over = len(numerator), sum(denominator)
    ratio = sum(numerator) / over
    if count < 2:
        return Interval(ratio, None, None)
    residuals = [a - ratio * b for a, b in zip(numerator, denominator, strict=True)]
    error = math.sqrt(count / (count - 1) * sum(each**2 for each in residuals)) / over
    reach = student_quantile(0.5 + LEVEL / 2, count - 1) * error / ratio
    return Interval(ratio, ratio * math.exp(-reach), ratio * math.exp(reach))


def student_quantile(share: float, freedom: int) -> float:
    """The quantile of Student's distribution, by its expansion around the normal one (Abramowitz and Stegun, 26.7.5);
    exact for one and two degrees of freedom, for which that is too short."""
    if freedom == 1:
        return math.tan(math.pi * (share - 0.5))
    if freedom == 2:
        return (2 * share - 1) * math.sqrt(2 / (4 * share * (1 - share)))
    z = NormalDist().inv_cdf(share)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / math.pow(freedom, power) for power, term in enumerate(terms))
