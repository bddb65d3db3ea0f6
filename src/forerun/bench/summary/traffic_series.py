"""Charts of a server's journal: what happened by category, and what replays say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from forerun.bench.summary.chart import Chart, Point, Series, point
from forerun.results import Figure, Results

_INTERVALS = "Dots are ratios of sums over answers, lines 95 % bootstrap intervals."
_SPREAD = "Dots are medians, thick lines hold half of the answers, thin lines 90 %."
_ERROR = "Both by replay. Lines are the error of the replay of what happened, on the same answers."
_MOST_CATEGORIES = 6
_TIMES = {"first": "Time to first token, waiting included", "per_token": "Time from token to token"}


def traffic_charts(results: Results) -> Iterable[Chart]:
    """All of them; those without points are left out by who asks."""
    figures = [each for each in results.figures if each.value is not None]
    yield _over_plain([each for each in figures if each.name == "over_plain"])
    lengths = [each for each in figures if each.name == "acceptance_length"]
    points = [point(_category(each), each) for each in lengths]
    yield Chart("Acceptance by category", _INTERVALS, "rows", "", "tokens per forward", [Series("", points)])
    yield _positions([each for each in figures if each.name == "position_acceptance"])
    spreads: Mapping[str, Any] = results.details.get("spread", {})
    for name, title in _TIMES.items():
        points = [_spread(category, each) for category, each in spreads.get(name, {}).items()]
        yield Chart(title, _SPREAD, "rows", "", "milliseconds", [Series("", points)], is_time=True)
    steps = [each for each in figures if each.name == "step"]
    series = [
        Series(method, [point(float(each.labels["sequences"]), each, 1e3) for each in _named(steps, method)])
        for method in _methods(steps)
    ]
    caption = "Means of all steps without rows of prompts, lines 95 % intervals."
    yield Chart("Time of a step", caption, "lines", "sequences in a step", "milliseconds", series)
    decided = [
        point(str(each.labels["method"]).replace(": ", ", "), each, 100) for each in figures if each.name == "decided"
    ]
    caption = "Of all forwards: whether something was drafted, and why. Why is told in the documentation of the server."
    yield Chart("What was decided about drafting", caption, "rows", "", "per cent", [Series("", decided)])


def _over_plain(figures: Sequence[Figure]) -> Chart:
    series = [
        Series(method, [point(_category(each), each) for each in _named(figures, method)])
        for method in _methods(figures)
    ]
    return Chart("Speed over plain decoding", _ERROR, "rows", "", "times plain decoding", series, reference=1)


def _positions(figures: Sequence[Figure]) -> Chart:
    names = list(dict.fromkeys(map(_category, figures)))[:_MOST_CATEGORIES]
    series = [
        Series(name, [point(float(each.labels["position"]), each) for each in figures if _category(each) == name])
        for name in names
    ]
    caption = "Of the drafts that reach a position, in all answers of a category; lines are 95 % bootstrap intervals."
    title = "Acceptance by draft position"
    return Chart(title, caption, "lines", "draft position", "accepted", series, is_share=True)


def _spread(category: str, quantiles: Sequence[float]) -> Point:
    return Point(category, *(1e3 * each for each in quantiles))


def _category(figure: Figure) -> str:
    return str(figure.labels.get("category") or "all")


def _methods(figures: Iterable[Figure]) -> list[str]:
    return list(dict.fromkeys(str(each.labels.get("method")) for each in figures))


def _named(figures: Iterable[Figure], method: str) -> list[Figure]:
    return [each for each in figures if str(each.labels.get("method")) == method]
