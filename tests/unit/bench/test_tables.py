"""Tables and workloads."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.bench import tables, workloads
from forerun.errors import ConfigError


def test_plain_columns_line_up() -> None:
    text = tables.plain(["method", "x"], [["a", "1"], ["longer", "22.5"]])
    assert text.splitlines() == ["method     x", "------  ----", "a          1", "longer  22.5"]


def test_markdown_escapes_its_own_sign() -> None:
    text = tables.markdown(["method", "x"], [["a|b", "1"]])
    assert text.splitlines() == ["| method | x |", "| --- | ---: |", "| a\\|b | 1 |"]


def test_percent() -> None:
    assert (tables.percent(0.555), tables.percent(None)) == ("56 %", "–")


def test_the_bundled_workload_is_there_and_cut_to_size() -> None:
    assert "code" in workloads.names()
    cases = workloads.load("code", 3)
    assert len(cases) == 3
    assert all(case.prompt and case.reference and case.name.endswith(".py") for case in cases)


def test_a_file_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b", "file": "b.py"}\n')
    assert [(case.name, case.prompt) for case in workloads.load(str(path))] == [("mine.jsonl:1", "a"), ("b.py", "b")]


@pytest.mark.parametrize("text", ["", "not json\n", '{"text": "a"}\n', '{"prompt": 3}\n', "[1]\n"])
def test_an_unreadable_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.jsonl"):
        workloads.load(str(path))


def test_an_unknown_workload_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="code"):
        workloads.load("no-such-workload")
