"""Charts of tunings and plans."""

from __future__ import annotations

from collections.abc import Iterable

from forerun.bench.summary.chart import Chart, Series, point
from forerun.results import Figure, Results

_MOST_ARMS = 16
"""Rows of one picture; the fastest ones are drawn."""
_AXIS = "times plain decoding"
_TITLES = {
    "report": (
        "Speed over plain decoding, on prompts that did not choose",
        "Dots are ratios of all seconds, lines 95 % intervals. Predicted: a replay of real drafts at measured costs.",
    ),
    "choosing": (
        "Speed over plain decoding while choosing",
        "The best of many arms has been lucky, too: the picture above is the fair one. Lines are 95 % intervals.",
    ),
}


def tune_charts(results: Results) -> Iterable[Chart]:
    """The finalists with what was predicted of them, then all arms."""
    held = [each for each in results.figures if each.value is not None]
    predicted = [each for each in held if each.name == "over_plain_predicted"]
    for part, (title, caption) in _TITLES.items():
        here = [each for each in held if each.name == "over_plain" and each.labels.get("part") == part]
        here = sorted(here, key=lambda each: -(each.value or 0))[:_MOST_ARMS]
        series = [Series("measured", [point(_arm(each), each) for each in here])]
        if part == "report" and predicted:
            series.append(Series("predicted", [point(_arm(each), each) for each in predicted]))
        yield Chart(title, caption, "rows", "", _AXIS, series, reference=1)


def plan_charts(results: Results) -> Iterable[Chart]:
    """Speed-up and break-even acceptance by K."""
    wanted = (
        ("over_plain_predicted", "Predicted speed over plain decoding", _AXIS, 1.0),
        ("break_even", "Acceptance from which it pays", "chance that a draft token is accepted", None),
    )
    for name, title, axis, reference in wanted:
        here = [each for each in results.figures if each.name == name and each.value is not None]
        points = [point(float(each.labels["num_draft_tokens"]), each) for each in here]
        caption = str(results.details.get("times", ""))
        yield Chart(title, caption, "lines", "draft tokens, K", axis, [Series("", points)], reference=reference)


def _arm(figure: Figure) -> str:
    return str(figure.labels["method"])
