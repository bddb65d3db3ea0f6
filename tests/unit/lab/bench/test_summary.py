"""Reports: what is drawn, what is warned of, and what is written."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.errors import ConfigError
from forerun.lab.bench.report import pictures as draw
from forerun.lab.bench.report.markdown import markdown, warnings_of
from forerun.lab.results.files import load_results
from forerun.lab.results.schema import DrafterFacts, Figure, Results, TableFacts
from measured import QUIET, forwards, generated, loads, qualities

ROOT = Path(__file__).parents[4]


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
        (lambda r: replace(r, environment=replace(QUIET, others=None, load_before=(3.0, 1, 1))), "busy before.*3.0"),
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


def test_each_figure_and_what_it_was_measured_on_has_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    every = [replace(each, source=f"{each.kind}.json") for each in (generated(), forwards(), loads(), qualities())]
    labels = {"method": "suffix, auto", "drafter": "suffix"}
    figures = [
        Figure("over_plain", {**labels, "part": part}, 1.6, 1.4, 1.8, 6) for part in ("choosing", "report", "other")
    ]
    every.append(replace(generated(), kind="tune", figures=figures, source="tune.json"))
    made = draw.draw(every, tmp_path)
    assert [path.stem for path in made] == [
        "generate-over_plain-workload-mine.jsonl-temperature-0.0",
        "forward-forward-by-rows-dtype-int8",
        "serve-tokens_per_second-by-outstanding-part-loop",
        "serve-first_token-by-outstanding-part-loop",
        "quality-perplexity_lost-workload-prose",
        "tune-over_plain-part-report",
        "tune-over_plain-part-choosing",
    ]
    assert sorted(made) == sorted(tmp_path.iterdir())
    assert draw.draw([replace(qualities(), kind="peers"), replace(qualities(), figures=[])], tmp_path) == []


def test_a_picture_has_every_method_with_its_interval() -> None:
    pytest.importorskip("matplotlib")
    ((_, kind, about, figures),) = draw._pictures(forwards())
    (axes,) = draw._drawn(kind, figures, about).axes
    assert [each.get_label() for each in axes.containers] == ["llama", "roofline"]
    line, _, (bars,) = axes.containers[0]
    assert list(line.get_xdata()) == [1, 4, 8] and list(line.get_ydata()) == [10, 40, 80]
    assert bars.get_segments()[1][:, 1] == pytest.approx([36, 48])
    assert axes.get_xlabel() == "rows" and axes.get_ylabel() == "time of a forward, ms"
    ((_, kind, about, figures),) = draw._pictures(qualities())
    (axes,) = draw._drawn(kind, figures, about).axes
    assert [each.get_text() for each in axes.get_yticklabels()] == ["int4"]
    (_, _, (bars,)) = axes.containers[0]
    assert bars.get_segments()[0][:, 0] == pytest.approx([0.01, 0.03])


def test_without_matplotlib_the_way_to_install_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'forerun\[report\]'"):
        draw.check_installed()


def test_markdown() -> None:
    text = markdown([forwards(), generated()], "# Head\n")
    assert text.startswith("# Head\n\n## Whole generations: bundled, bfloat16\n\n`forerun bench generate")
    assert "commit" not in text and "(abc1234567)" in text and "20.0 \\| a" in text


def test_a_page_of_several_files_has_the_main_tables_alone() -> None:
    header = ["method", "tokens/s", "p90"]
    rows = [["forerun, plain", "50", "7"], ["forerun, bare loop", "51", "6"]]
    named = ("a, code, greedy", "Acceptance by draft position, code", "a, code, greedy, chat", "a, code, greedy, maths")
    results = replace(
        generated(),
        prompts=[replace(each, category=name) for each, name in zip(generated().prompts, ["chat", "maths"] * 6)],
        tables=[TableFacts(name, header, rows) for name in named],
    )
    alone, among = markdown([results]), markdown([results, replace(results, kind="plan")])
    assert all(f"#### {name}\n" in alone for name in named) and "bare loop" in alone and "p90" in alone
    assert re.findall("#### (.*)", among) == ["a, code, greedy"] and "| forerun, plain | 50 |\n" in among
    assert "bare loop" not in among and "p90" not in among and "Plan" not in among


def test_a_page_of_several_files_has_verdicts_and_finalists() -> None:
    audit = replace(generated(), kind="audit", tables=[TableFacts("Bits: pass.", ["test"], [["one"]])])
    arms = TableFacts("Arms", ["arm", "choosing", "over plain"], [["suffix", "1.3", "1.2"], ["eagle", "1.1", "–"]])
    text = markdown([audit, replace(generated(), kind="tune", tables=[arms])])
    assert "#### Bits: pass.\n" in text and "| one |" not in text
    assert "| suffix | 1.2 |\n" in text and "eagle" not in text


def test_benchmarks_md_is_what_is_made_of_the_committed_results() -> None:
    """`make report` writes it."""
    files = sorted((ROOT / "benchmarks").glob("*.json"))
    head = (ROOT / "benchmarks" / "head.md").read_text(encoding="utf-8")
    made = markdown([load_results(path) for path in files], head)
    assert files and (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8") == made
    assert sum(path.stat().st_size for path in files) < 800_000
