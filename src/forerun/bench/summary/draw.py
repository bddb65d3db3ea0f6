"""Charts as SVG by Matplotlib. Colours are variables of CSS, so that a page's light and dark theme reach into them."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from forerun.bench.summary.chart import Chart, Point, Series
from forerun.errors import ConfigError

INSTALL = "pip install 'forerun[report]'"
WIDTH = 5.4
"""Inches of a picture: as wide as a telephone shows without shrinking its text much."""
ROW = 0.27
LABEL = 24
"""Characters of a line of a row's name."""
MARKERS = "osD^vPX*"
NUM_COLOURS = 8
_TEXT, _GRID, _REFERENCE = "#0a0b01", "#0a0b02", "#0a0b03"
_COLOURS = [f"#0a0b{0x10 + place:02x}" for place in range(NUM_COLOURS)]
_VARIABLES = {_TEXT: "currentColor", _GRID: "var(--grid)", _REFERENCE: "var(--reference)"} | {
    colour: f"var(--s{place})" for place, colour in enumerate(_COLOURS)
}
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": _TEXT,
    "axes.edgecolor": _TEXT,
    "axes.labelcolor": _TEXT,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
}


def check_installed() -> None:
    """Raise ConfigError where Matplotlib is not."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"A page has pictures, and Matplotlib, which draws them, is not installed. Install it: {INSTALL}; or take "
            "--markdown, --json or --csv, which need none."
        ) from None


def drawn(chart: Chart, number: int) -> str:
    """The picture as an SVG element. number: of the picture in its page, which keeps its names apart from others'."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context({**_STYLE, "svg.hashsalt": f"forerun {number}"}):
        rows = _row_names(chart)
        height = 1.1 + ROW * _lines(chart, rows) if chart.form == "rows" else 3.2
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        axes: Any = figure.add_subplot()
        if chart.form == "rows":
            _draw_rows(axes, chart, rows)
        else:
            _draw_lines(axes, chart)
        if sum(bool(series.name) for series in chart.series):
            figure.legend(loc="outside lower center", ncols=2, fontsize=8, handletextpad=0.4, columnspacing=1.2)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return themed(out.getvalue(), chart.title)


def themed(svg: str, title: str) -> str:
    """The element alone, with variables for colours, the page's font, and no names that nothing refers to."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    referred = set(re.findall(r"#([\w-]+)[\")]", svg))
    svg = re.sub(r' id="([\w.-]+)"', lambda found: found[0] if found[1] in referred else "", svg)
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font: \1 system-ui, sans-serif", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    label = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    head = re.search(r'viewBox="([^"]+)"', svg)
    assert head is not None
    return f'<svg viewBox="{head[1]}" role="img" aria-label="{label}">' + svg[svg.index(">") + 1 :].strip()


def _look(series: Series) -> tuple[str, str]:
    """Its colour and marker."""
    return _COLOURS[series.slot % NUM_COLOURS], MARKERS[series.slot % len(MARKERS)]


def _row_names(chart: Chart) -> list[str]:
    return list(dict.fromkeys(str(point.at) for series in chart.series for point in series.points))


def _lines(chart: Chart, rows: Sequence[str]) -> float:
    """The height of all rows, in lines."""
    drawn_series = len(chart.series)
    legend = 0.75 * ((drawn_series + 1) // 2) if drawn_series > 1 else 0
    return sum(max(_wrapped(row).count("\n") + 1, 0.62 * drawn_series) + 0.25 for row in rows) + legend


def _wrapped(name: str) -> str:
    """Broken after signs too, since names of drafters hold no blanks."""
    parts = textwrap.wrap(re.sub(r"([,:+])(?=\S)", r"\1 ", name), LABEL)
    return "\n".join(re.sub(r"([:+]) ", r"\1", part) for part in parts) or name


def _draw_rows(axes: Any, chart: Chart, rows: Sequence[str]) -> None:
    count = len(chart.series)
    for place, series in enumerate(chart.series):
        colour, marker = _look(series)
        offset = 0.0 if count == 1 else 0.7 * (place / (count - 1) - 0.5)
        label = series.name or None
        for point in series.points:
            height = rows.index(str(point.at)) + offset
            if point.outer_low is not None:
                axes.hlines(height, point.outer_low, point.outer_high, color=colour, linewidth=1)
            if point.low is not None:
                axes.hlines(height, point.low, point.high, color=colour, linewidth=3 if point.outer_low else 1.5)
            axes.plot(point.value, height, marker, color=colour, markersize=5, label=label, linestyle="none")
            label = None
    axes.set_yticks(range(len(rows)), [_wrapped(row) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(chart.value_title)
    if chart.reference is not None:
        axes.axvline(chart.reference, color=_REFERENCE, linewidth=1, linestyle="--", zorder=0)
    if chart.is_time:
        _set_log(axes.xaxis, axes.set_xscale, [point for series in chart.series for point in series.points])
    axes.grid(axis="x", color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def _draw_lines(axes: Any, chart: Chart) -> None:
    for series in chart.series:
        colour, marker = _look(series)
        points = sorted(series.points, key=lambda point: float(point.at))
        at, values = [float(point.at) for point in points], [point.value for point in points]
        if series.is_bound:
            axes.plot(at, values, color=_TEXT, linewidth=1, linestyle=":", label=series.name)
            continue
        below = [point.value - (point.value if point.low is None else point.low) for point in points]
        above = [(point.value if point.high is None else point.high) - point.value for point in points]
        errors = [[max(0.0, each) for each in side] for side in (below, above)]
        axes.errorbar(
            at,
            values,
            errors,
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=1.3,
            elinewidth=1,
            label=series.name,
        )
    axes.set_xlabel(chart.at_title)
    axes.set_ylabel(chart.value_title)
    everywhere = sorted({float(point.at) for series in chart.series for point in series.points})
    if chart.is_log:
        axes.set_xscale("log", base=2)
    if len(everywhere) <= 12:
        axes.set_xticks(everywhere, [f"{each:g}" for each in everywhere])
        axes.minorticks_off()
    if chart.is_share:
        axes.set_ylim(-0.03, 1.05)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    else:
        axes.set_ylim(bottom=0)
    if chart.reference is not None:
        axes.axhline(chart.reference, color=_REFERENCE, linewidth=1, linestyle="--", zorder=0)
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def _set_log(axis: Any, set_scale: Any, points: Sequence[Point]) -> None:
    """A logarithmic axis with plain numbers, where the values span more than a factor of 4."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    held = [each for point in points for each in (point.value, point.outer_low, point.outer_high) if each]
    if not held or min(held) <= 0 or max(held) < 4 * min(held):
        return
    set_scale("log")
    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
