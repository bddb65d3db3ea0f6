"""What the bench commands print."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import pytest

from forerun.kernels.provenance import describe_environment
from forerun.lab.bench import acceptance as acceptance_rate, forward, generate, quality, replay, tables as report
from forerun.lab.bench.report.headline import sections
from forerun.lab.results.files import as_object
from forerun.lab.results.schema import TargetFacts
from measured import QUIET, generated


def test_plain_columns_line_up() -> None:
    text = report.plain_table(["method", "x"], [["a", "1"], ["longer", "22.5"]])
    assert text.splitlines() == ["method     x", "------  ----", "a          1", "longer  22.5"]


def test_a_table_wider_than_the_terminal_goes_on_below() -> None:
    header, rows = ["method", "speed", "remark", "same"], [["plain", "1.0", "a long cell", "no"]]
    first, second, third = report.plain_table(header, rows, 20).split("\n\n")
    assert first.splitlines() == ["method  speed", "------  -----", "plain     1.0"]
    assert second.splitlines()[-1] == "plain   a long cell"
    assert third.splitlines()[-1] == "plain     no"
    assert report.plain_table(header, rows, 80) == report.plain_table(header, rows)


def test_markdown_escapes_its_own_sign() -> None:
    text = report.markdown_table(["method", "x"], [["a|b", "1"]])
    assert text.splitlines() == ["| method | x |", "| --- | ---: |", "| a\\|b | 1 |"]


def test_percent() -> None:
    assert (report.percent(0.555), report.percent(None)) == ("56 %", "–")


def test_one_report_prints_text_and_markdown_and_gives_results() -> None:
    table = report.Table("Title", ["method", "x"], [["a", "1"]])
    one = report.Report("replay", [table, table], TargetFacts("m", cost_padded=True), details={"results": [1]})
    facts = describe_environment(QUIET)
    text, markdown = one.text(QUIET), one.text(QUIET, markdown=True)
    assert text == f"\n{report.PADDED_NOTE}\n" + "\nTitle\nmethod  x\n------  -\na       1\n" * 2 + f"\n{facts}"
    assert "\n\n### Title\n\n| method | x |\n" in markdown and markdown.endswith(f"\n\n{facts}")
    found = as_object(one.results("forerun bench replay", QUIET))
    assert found["environment"]["processor"] == "Some Processor" and found["details"] == {"results": [1]}
    assert found["tables"][1] == {"title": "Title", "header": ["method", "x"], "rows": [["a", "1"]]}
    assert report.PADDED_NOTE not in dataclasses.replace(one, target=None).text(QUIET)


@pytest.mark.parametrize("module", [acceptance_rate, forward, generate, quality, replay])
def test_every_measurement_has_a_table(module: ModuleType) -> None:
    defined = {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    assert "COLUMNS" in vars(module) or any(name.endswith("_table") for name in defined)


def test_the_readme_has_drafters_of_published_files_by_kind_of_prompt() -> None:
    one = generated(4)
    slow = dataclasses.replace(one.rows[1], seconds=2.0, same_text=False)  # as long as plain decoding
    rows = [one.rows[0], slow, *one.rows[2:]]
    published = dataclasses.replace(one, target=TargetFacts("coder.gguf", "Q4_K_M"), rows=rows)
    text = sections([one, published])["drafters"]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    assert lines[0] == ["coder, times plain", "x", "y", "all", "least", "text as plain's"]
    assert lines[2:] == [
        ["plain, tokens/s", "10.0", "10.0", "10.0", "–", "–"],
        ["suffix", "1.45", "2.11", "1.75", "1.00", "3 of 4"],
    ]
    assert text.endswith("\n\nSome Processor, 2 threads, 2026-11-23, commit abc1234567.")
    assert sections([one])["drafters"] == ""
