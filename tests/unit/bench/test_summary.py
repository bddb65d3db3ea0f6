"""Reports: what is drawn, what is warned of, and a page that stands alone."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.bench.summary import draw, series
from forerun.bench.summary.page import page
from forerun.bench.summary.text import csv_lines, markdown
from forerun.bench.summary.warnings import warnings_of
from forerun.errors import ConfigError
from forerun.results import DrafterFacts, Figure, Results, load
from measured import PLAIN, QUIET, SUFFIX, forwards, generated, loads, qualities

ROOT = Path(__file__).parents[3]


def test_the_charts_of_generations() -> None:
    found = {chart.title.partition(":")[0]: chart for chart in series.charts(generated())}
    whole = found["Speed over plain decoding"]
    (only,) = whole.series
    assert [(point.at, point.value, point.low) for point in only.points] == [("suffix, auto", 2.0, 1.8)]
    assert [point.at for point in found["By category"].series[0].points] == ["x", "y"]
    positions = found["Acceptance by draft position"].series[0].points
    assert [point.value for point in positions] == [1, 1, 1, 0] and positions[0].low == positions[0].high == 1
    contexts = found["Acceptance by context length"].series[0].points
    assert [point.at for point in contexts] == [64, 128, 256] and {point.value for point in contexts} == {4}
    assert [point.at for point in found["Time to first token"].series[0].points] == ["plain", "suffix, auto"]
    plain, _ = found["Time between tokens"].series[0].points
    assert plain.outer_low is not None and plain.outer_low < plain.value == pytest.approx(105.9, abs=0.1)


def test_the_charts_of_forwards_loads_and_formats() -> None:
    (chart,) = series.charts(forwards())
    assert [each.is_bound for each in chart.series] == [False, True] and chart.series[0].points[1].value == 40
    assert [chart.title for chart in series.charts(loads())] == [
        "Tokens per second, closed loop",
        "Time to first token, closed loop",
    ]
    (chart,) = series.charts(qualities())
    assert chart.series[0].points[0].at == "prose, int4" and chart.series[0].points[0].high == 3
    assert series.charts(replace(qualities(), kind="peers")) == []


def test_a_ratio_of_sums_has_its_interval() -> None:
    value, low, high = series.ratio_of_sums([1, 2, 3, 10], [1, 4, 6, 10])
    assert value == 16 / 21 and low is not None and high is not None and low < value < high
    assert series.ratio_of_sums([1], [2]) == (0.5, None, None)


def test_a_ratio_of_many_sums_is_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    above, below = [1, 2, 3, 10, 4, 7, 5], [1, 4, 6, 10, 9, 13, 8]
    whole = series.ratio_of_sums(above, below, 500)
    assert whole != series.ratio_of_sums(above, below)
    monkeypatch.setattr(series, "_MOST_DRAWN", 16)
    assert series.ratio_of_sums(above, below, 500) == whole


Change = Callable[[Results], Results]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: replace(r, prompts=[replace(each, random=True) for each in r.prompts]), "12 prompts are random"),
        (lambda r: replace(r, target=replace(r.target, random_weights=True)), "random weights"),
        (lambda r: replace(r, target=replace(r.target, cost_padded=True)), "cost-padded"),
        (lambda r: replace(r, drafters=[DrafterFacts("eagle", "eagle", (), 3, "here")]), r"3 of 12 prompts share 13"),
        (lambda r: replace(r, rows=[replace(each, same_text=False) for each in r.rows]), "Texts differ"),
        (lambda r: replace(r, figures=[Figure("over_plain", {}, None)]), "1 figures are not numbers"),
        (lambda r: replace(r, figures=[replace(each, samples=4) for each in r.figures]), "fewer than 10 samples"),
        (lambda r: replace(r, figures=[Figure("over_plain", {}, 1.2, samples=1)]), "of a single run"),
        (lambda r: replace(r, prompts=r.prompts[:2], rows=r.rows[:4]), "only 2 prompts"),
        (lambda r: replace(r, figures=[replace(each, low=0.9) for each in r.figures[1:]]), "interval holds 1.*suffix"),
        (lambda r: replace(r, environment=replace(QUIET, load_before=(3.0, 1, 1))), "busy before.*3.0"),
        (lambda r: replace(r, environment=replace(QUIET, others=1.5)), "kept 1.5 processors busy"),
        (lambda r: replace(r, environment=replace(QUIET, stolen=0.2)), "20 % of the processors' time"),
        (lambda r: replace(r, environment=replace(QUIET, dirty=True)), "checkout was changed"),
    ],
)
def test_what_weakens_figures_is_said(change: Change, message: str) -> None:
    assert warnings_of([generated()]) == []
    assert [text for text in warnings_of([change(generated())]) if re.search(message, text)]


def test_results_of_other_machines_and_commits_are_marked() -> None:
    other = replace(generated(), environment=replace(QUIET, processor="Other", commit="fff"), source="other.json")
    assert any("2 machines" in text for text in warnings_of([generated(), other]))
    assert any("2 versions of forerun" in text for text in warnings_of([generated(), other]))
    assert "2 machines" in markdown([generated(), other])
    planned = replace(other, kind="plan", details={"source": "bound"})
    assert warnings_of([planned]) == [] and warnings_of([generated(), planned]) == []
    noisy = replace(other, environment=replace(QUIET, stolen=0.2))
    assert any(text.startswith("other.json: 20 %") for text in warnings_of([generated(), noisy]))


def test_the_page_stands_alone() -> None:
    pytest.importorskip("matplotlib")
    hostile = replace(generated(), command='forerun "<script>alert(1)</script>"', source="a<b>.json")
    text = page([hostile, forwards(), loads(), qualities()])
    assert len(text.encode()) < 1_000_000
    assert "<script" not in text and "&lt;script" in text
    without_names = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert "http:" not in without_names and "https:" not in without_names and "@import" not in text
    pictures = re.findall(r"<svg .*?</svg>", text, re.DOTALL)
    assert len(pictures) == 10 == text.count("<figcaption>")
    assert all('role="img"' in each and "currentColor" in each for each in pictures)
    assert "prefers-color-scheme: dark" in text and "var(--s0)" in text and "#0a0b" not in text
    assert "milliseconds" in text and "rows of a forward" in text and "draft position" in text
    names = re.findall(r' id="([^"]+)"', text)
    assert len(names) == len(set(names))


def test_without_matplotlib_the_way_to_install_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'forerun\[report\]'"):
        draw.check_installed()


def test_markdown_and_lines_for_a_spreadsheet() -> None:
    text = markdown([forwards(), generated()], "# Head\n")
    assert text.startswith("# Head\n\n## Whole generations: bundled, bfloat16\n\n`forerun bench generate")
    assert "commit" not in text and "(abc1234567)" in text and "20.0 \\| a" in text
    lines = list(csv.DictReader(io.StringIO(csv_lines([generated(), forwards()]))))
    assert len(lines) == 10
    assert (lines[1]["figure"], lines[1]["method"], lines[1]["low"]) == ("over_plain", SUFFIX, "1.8")
    assert lines[0]["method"] == PLAIN and lines[4]["rows"] == "1" and lines[4]["unit"] == "s"


def test_benchmarks_md_is_what_is_made_of_the_committed_results() -> None:
    """`make report` writes it."""
    files = sorted((ROOT / "benchmarks").glob("*.json"))
    head = (ROOT / "benchmarks" / "head.md").read_text(encoding="utf-8")
    made = markdown([load(path) for path in files], head)
    assert files and (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8") == made
    assert sum(path.stat().st_size for path in files) < 800_000


def test_the_charts_of_tunings() -> None:
    """What was measured on prompts that did not choose stands beside what was predicted."""
    labels = {"method": "suffix, auto", "drafter": "suffix"}
    figures = [
        Figure("over_plain", {**labels, "part": "choosing"}, 1.6, 1.4, 1.8, 6),
        Figure("over_plain", {**labels, "part": "report"}, 1.4, 1.3, 1.5, 6),
        Figure("over_plain_predicted", labels, 1.35),
    ]
    fair, choosing, positions = series.charts(replace(generated(), kind="tune", figures=figures))
    assert [(each.name, each.points[0].value) for each in fair.series] == [("measured", 1.4), ("predicted", 1.35)]
    assert choosing.series[0].points[0].value == 1.6 and positions.title.startswith("Acceptance by draft position")
