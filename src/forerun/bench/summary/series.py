"""From results to the charts of a report."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from forerun.bench.measure import LEVEL, RESAMPLES
from forerun.bench.summary.chart import SPREAD_SHARES, Chart, Point, Series, point
from forerun.bench.summary.command_series import plan_charts, tune_charts
from forerun.bench.summary.traffic_series import traffic_charts
from forerun.results import FIGURES, Figure, Results, RunRow
from forerun.results.gaps import added, quantile

INTERVALS = "Dots are medians, lines 95 % bootstrap intervals."
SPREAD = "Dots are medians, thick lines hold half of the values, thin lines 90 %."
MOST_SERIES = 6
"""Of one picture; the fastest ones are drawn."""
POSITIONS = 12
LEAST_REACHED = 20
"""Drafts that must have reached a position for its acceptance to be drawn."""
LEAST_RUNS = 2
"""Of a class of contexts: one alone has no interval."""
LEAST_CONTEXT = 64
"""Tokens below which contexts are not told apart."""
PLAIN = "forerun, plain"
_MOST_DRAWN = 1 << 20
"""Runs that are drawn at once: a journal has many."""


def charts(results: Results) -> list[Chart]:
    """All that can be drawn of one file; an empty list where nothing can."""
    made = [chart for make in _MAKERS.get(results.kind, ()) for chart in make(results)]
    names = dict.fromkeys(row.method for row in results.rows if row.num_drafted)
    names |= dict.fromkeys(each.name for chart in made for each in chart.series if each.name and not each.is_bound)
    slots = {name: place for place, name in enumerate(dict.fromkeys(map(short, names)))}
    slotted = [
        replace(chart, series=[replace(each, slot=slots.get(each.name, 0)) for each in chart.series if each.points])
        for chart in made
    ]
    return [chart for chart in slotted if chart.series]


def ratio_of_sums(
    above: Sequence[float], below: Sequence[float], resamples: int = RESAMPLES
) -> tuple[float, float | None, float | None]:
    """sum(above) / sum(below) over runs, with the bootstrap interval of drawing runs again; always the same one."""
    value = sum(above) / sum(below)
    if len(above) < 2:
        return value, None, None
    tops, bottoms, generator = np.asarray(above), np.asarray(below), np.random.default_rng(0)
    ratios, at_once = [], max(1, _MOST_DRAWN // len(above))
    for start in range(0, resamples, at_once):
        drawn = generator.integers(0, len(above), size=(min(at_once, resamples - start), len(above)))
        sums = tops[drawn].sum(1), bottoms[drawn].sum(1)
        ratios.append((sums[0] / np.maximum(sums[1], 1e-300))[sums[1] > 0])
    low, high = np.quantile(np.concatenate(ratios), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return value, float(low), float(high)


def short(method: str) -> str:
    """A method's name without forerun's."""
    return method.removeprefix("forerun, ")


def _about(workload: object, temperature: object) -> str:
    return f"{workload}, {'greedy' if not temperature else f'temperature {temperature:g}'}"


def _speedups(results: Results) -> Iterable[Chart]:
    """Speed over plain decoding: all methods, and the fastest by category."""
    ratios = [each for each in results.figures if each.name == "over_plain" and each.value is not None]
    for workload, temperature in _settings(ratios):
        here = [each for each in ratios if _is_of(each, workload, temperature)]
        whole = [each for each in here if not each.labels.get("category") and each.labels["method"] != PLAIN]
        about = _about(workload, temperature)
        points = [point(short(str(each.labels["method"])), each) for each in whole]
        title, axis = f"Speed over plain decoding: {about}", "times plain decoding"
        yield Chart(title, INTERVALS, "rows", "", axis, [Series("", points)], reference=1)
        best = [str(each.labels["method"]) for each in sorted(whole, key=lambda each: -(each.value or 0))]
        best = [method for method in best if method.startswith("forerun, ")][:MOST_SERIES]
        parts = [each for each in here if each.labels.get("category")]
        if parts and best:
            series = [
                Series(
                    short(method),
                    [point(str(each.labels["category"]), each) for each in parts if each.labels["method"] == method],
                )
                for method in best
            ]
            yield Chart(f"By category: {about}", INTERVALS, "rows", "", axis, series, reference=1)


def _positions(results: Results) -> Iterable[Chart]:
    """Acceptance at each draft position, of the drafts that reach it."""
    for about, runs in _by_setting(results).items():
        series = []
        for method, rows in _drafting(runs).items():
            points = []
            for place in range(min(POSITIONS, max((len(row.reached) for row in rows), default=0))):
                there = [row for row in rows if len(row.reached) > place]
                reached = [row.reached[place] for row in there]
                accepted = [row.accepted[place] if place < len(row.accepted) else 0 for row in there]
                if sum(reached) >= LEAST_REACHED:
                    points.append(Point(place + 1, *ratio_of_sums(accepted, reached)))
            series.append(Series(short(method), points))
        yield Chart(
            f"Acceptance by draft position: {about}",
            "Of the drafts that reach a position; lines are 95 % bootstrap intervals over runs.",
            "lines",
            "draft position",
            "accepted",
            series,
            is_share=True,
        )


def _contexts(results: Results) -> Iterable[Chart]:
    """Tokens per forward by the context in the middle of the answer, in classes that double."""
    for about, runs in _by_setting(results).items():
        series = []
        for method, rows in _drafting(runs).items():
            classes: dict[float, list[RunRow]] = defaultdict(list)
            for row in rows:
                context = results.prompts[row.prompt].num_tokens + row.num_tokens / 2
                classes[max(LEAST_CONTEXT, 2 ** int(np.log2(max(context, 1))))].append(row)
            points = [
                Point(start, *ratio_of_sums([row.num_tokens for row in each], [row.num_forwards for row in each]))
                for start, each in sorted(classes.items())
                if len(each) >= LEAST_RUNS
            ]
            series.append(Series(short(method), points))
        yield Chart(
            f"Acceptance by context length: {about}",
            "Each dot stands for contexts from there to twice as long; lines are 95 % bootstrap intervals over runs.",
            "lines",
            "tokens of context, at least",
            "tokens per forward",
            series,
            is_log=True,
        )


def _first_tokens(results: Results) -> Iterable[Chart]:
    """The spread of the times to the first token."""
    for about, runs in _by_setting(results).items():
        points = []
        for method, rows in runs.items():
            times = [1e3 * row.first_token for row in rows if row.first_token is not None]
            if times:
                points.append(Point(short(method), *(float(np.quantile(times, share)) for share in SPREAD_SHARES)))
        yield Chart(
            f"Time to first token: {about}", SPREAD, "rows", "", "milliseconds", [Series("", points)], is_time=True
        )


def _gaps(results: Results) -> Iterable[Chart]:
    """The spread of the times between tokens."""
    for about, runs in _by_setting(results).items():
        points = []
        for method, rows in runs.items():
            if counts := added(row.gaps for row in rows):
                points.append(Point(short(method), *(1e3 * quantile(counts, share) for share in SPREAD_SHARES)))
        caption = f"{SPREAD} Tokens that come together share the time since the tokens before."
        yield Chart(
            f"Time between tokens: {about}", caption, "rows", "", "milliseconds", [Series("", points)], is_time=True
        )


def _forwards(results: Results) -> Iterable[Chart]:
    """Times of forwards by rows, beside the roofline."""
    times = [each for each in results.figures if each.name in ("forward", "roofline") and each.value is not None]
    for dtype in dict.fromkeys(each.labels.get("dtype") for each in times):
        here = [each for each in times if each.labels.get("dtype") == dtype]
        counted = "sequences" if any("sequences" in each.labels for each in here) else "rows"
        series = []
        for method in dict.fromkeys(str(each.labels.get("method")) for each in here):
            mine = [each for each in here if each.labels.get("method") == method]
            points = [point(float(each.labels[counted]), each, 1e3) for each in mine]
            series.append(Series(method, points, is_bound=mine[0].name == "roofline"))
        yield Chart(
            f"One forward: {dtype}",
            f"{INTERVALS} The roofline is the least time by this machine's bandwidth and arithmetic.",
            "lines",
            f"{counted} of a forward",
            "milliseconds",
            series,
        )


def _loads(results: Results) -> Iterable[Chart]:
    """Throughput and times of many requests at once, by how many there are."""
    wanted = (
        ("loop", "outstanding", "tokens_per_second", 1.0, "tokens per second", None),
        ("loop", "outstanding", "over_plain", 1.0, "times plain decoding", 1.0),
        ("loop", "outstanding", "first_token", 1e3, "milliseconds", None),
        ("loop", "outstanding", "between_tokens", 1e3, "milliseconds", None),
        ("loop", "outstanding", "per_token", 1e3, "milliseconds", None),
        ("batches", "batch", "tokens_per_second", 1.0, "tokens per second", None),
    )
    for part, at, name, scale, unit, reference in wanted:
        here = [each for each in results.figures if each.name == name and each.labels.get("part") == part]
        here = [each for each in here if each.value is not None and at in each.labels]
        methods = dict.fromkeys(str(each.labels["method"]) for each in here)
        series = [
            Series(
                method,
                [point(float(each.labels[at]), each, scale) for each in here if each.labels["method"] == method],
            )
            for method in methods
        ]
        where, axis = ("outstanding requests", "closed loop") if part == "loop" else ("sequences", "plain decoding")
        title = f"{FIGURES[name].title[0].upper()}{FIGURES[name].title[1:]}, {axis}"
        caption = INTERVALS if any(each.low is not None for each in here) else "Medians over all requests."
        yield Chart(title, caption, "lines", where, unit, series, reference=reference, is_log=True)


def _lengths(results: Results) -> Iterable[Chart]:
    """Tokens per forward by category, of drafts of a fixed K; nothing was timed."""
    lengths = [each for each in results.figures if each.name == "acceptance_length" and each.value is not None]
    for workload, temperature in _settings(lengths):
        here = [each for each in lengths if _is_of(each, workload, temperature)]
        values = {str(each.labels["method"]): each.value or 0.0 for each in here}
        methods = sorted(values.items(), key=lambda each: -each[1])
        series = [
            Series(
                name,
                [point(str(each.labels["category"] or "all"), each) for each in here if each.labels["method"] == name],
            )
            for name, _ in methods[:MOST_SERIES]
        ]
        title, caption = f"Acceptance: {_about(workload, temperature)}", "All prompts of a category together."
        yield Chart(title, caption, "rows", "", "tokens per forward", series)


def _quality(results: Results) -> Iterable[Chart]:
    """What formats of the weights cost."""
    lost = [each for each in results.figures if each.name == "perplexity_lost" and each.value is not None]
    points = [point(f"{each.labels.get('workload')}, {each.labels.get('method')}", each, 100) for each in lost]
    caption = "Dots are means, lines two standard errors to either side."
    yield Chart("Perplexity lost", caption, "rows", "", "per cent of float32's", [Series("", points)], reference=0)


_MAKERS: Mapping[str, tuple[Callable[[Results], Iterable[Chart]], ...]] = {
    "generate": (_speedups, _positions, _contexts, _first_tokens, _gaps),
    "acceptance": (_lengths,),
    "forward": (_forwards,),
    "load": (_loads,),
    "serve": (_loads,),
    "quality": (_quality,),
    "tune": (tune_charts, _positions),
    "plan": (plan_charts,),
    "journal": (traffic_charts,),
}


def _settings(figures: Iterable[Figure]) -> list[tuple[object, object]]:
    return list(dict.fromkeys((each.labels.get("workload"), each.labels.get("temperature")) for each in figures))


def _is_of(figure: Figure, workload: object, temperature: object) -> bool:
    return (figure.labels.get("workload"), figure.labels.get("temperature")) == (workload, temperature)


def _by_setting(results: Results) -> dict[str, dict[str, list[RunRow]]]:
    """Workload and temperature, in words -> method -> runs."""
    found: dict[str, dict[str, list[RunRow]]] = defaultdict(lambda: defaultdict(list))
    for row in results.rows:
        found[_about(results.prompts[row.prompt].workload, row.temperature)][row.method].append(row)
    return found


def _drafting(runs: Mapping[str, Sequence[RunRow]]) -> dict[str, Sequence[RunRow]]:
    """Those that draft, the longest accepted first, at most MOST_SERIES."""
    mine = {method: [row for row in rows if row.num_forwards] for method, rows in runs.items()}
    mine = {method: rows for method, rows in mine.items() if any(row.num_drafted for row in rows)}
    lengths = {
        method: statistics.fmean(row.num_tokens / row.num_forwards for row in rows) for method, rows in mine.items()
    }
    return {method: mine[method] for method in sorted(mine, key=lambda each: -lengths[each])[:MOST_SERIES]}
