"""A picture as data: what is drawn, before anything draws it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from forerun.results import Figure

SPREAD_SHARES = (0.5, 0.25, 0.75, 0.05, 0.95)
"""The quantiles of a spread, in the order in which a point has them."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measured value.

    Attributes:
        at: where it stands: a number, or a name in a chart of rows.
        value, low, high: with its 95 % interval; of a distribution the median and quartiles.
        outer_low, outer_high: of a distribution, where 5 and 95 % lie below.
    """

    at: float | str
    value: float
    low: float | None = None
    high: float | None = None
    outer_low: float | None = None
    outer_high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour.

    Attributes:
        name: for the legend; empty where there is nothing to tell apart.
        is_bound: a line without markers, for what is not measured.
        slot: which of the colours and markers; one name has the same one in all pictures of a file.
    """

    name: str
    points: Sequence[Point]
    is_bound: bool = False
    slot: int = 0


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture.

    Attributes:
        title: above it.
        caption: below it: what the marks and their lines are.
        form: "rows" has a name on each row and the values beside it; "lines" has numbers on both axes.
        at_title, value_title: of the axes, with units.
        series: what is drawn.
        reference: a line at this value, such as 1 for ratios.
        is_log: whether the axis of `at` is logarithmic, to base 2.
        is_share: values are shares, shown as percentages from 0 to 100.
        is_time: values are spread over decades: their axis is logarithmic.
    """

    title: str
    caption: str
    form: Literal["rows", "lines"]
    at_title: str
    value_title: str
    series: Sequence[Series]
    reference: float | None = None
    is_log: bool = False
    is_share: bool = False
    is_time: bool = False


def point(at: float | str, figure: Figure, scale: float = 1.0) -> Point:
    """A figure with its interval as a point."""
    value, low, high = (None if each is None else scale * each for each in (figure.value, figure.low, figure.high))
    assert value is not None
    return Point(at, value, low, high)
