"""Results are written and read back; what is no such file, or is damaged, is refused by name."""

from __future__ import annotations

import json
import math
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from forerun.errors import ConfigError
from forerun.kernels import provenance
from forerun.kernels.provenance import Watch
from forerun.lab.results.files import as_object, command_line, load_results, save_results
from forerun.lab.results.schema import DrafterFacts, Figure, PromptFacts, Results, RunRow, TableFacts, TargetFacts


def results() -> Results:
    prompts = [PromptFacts("a", "code", "", 12, "f00"), PromptFacts("b", "code", "x", 700, random=True)]
    row = RunRow(1, "forerun, suffix, auto", "suffix", 0.0, 0, 5, 0.25, 3, 6, 2, [3, 1], [2, 0], 0.1, True)
    return Results(
        "generate",
        "forerun bench generate",
        Watch.begin().environment(),
        TargetFacts("bundled", "bfloat16"),
        {"max_tokens": 8},
        [DrafterFacts("suffix", "suffix", ["auto", 4], 0, "its training data")],
        prompts,
        [row, replace(row, prompt=0, same_text=None)],
        [Figure("over_plain", {"method": "m", "rows": 3}, 1.5, 1.25, None, 4), Figure("x", {}, math.nan)],
        [TableFacts("Title", ["a", "b"], [["1", "2"]])],
        {"costs": [1, {"deep": 2}]},
    )


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    before = results()
    save_results(before, tmp_path / "r.json")
    after = load_results(tmp_path / "r.json")
    assert as_object(after) == as_object(before)
    assert after.rows[0] == replace(before.rows[0], reached=(3, 1), accepted=(2, 0))
    assert after.figures[1].value is None
    assert after.environment.machine == before.environment.machine
    assert (tmp_path / "r.json").read_text().count("\n") > 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "holds no results"),
        ({"version": 2}, r"version 2 of the schema, but this forerun reads 1\. Update forerun"),
        ({"version": "1"}, "version is '1'"),
        ({"kind": "speed"}, "kind is 'speed'"),
        ({"environment": None}, "environment is None"),
        ({"prompts": []}, r"rows\[0\] is of prompt 1, but there are 0"),
        ({"figures": [{"name": "x", "labels": {"a": []}, "value": 1}]}, r"figures\[0\]: labels: a is \[\]"),
        ({"figures": [{"name": "x", "labels": {}, "value": "fast"}]}, "value is 'fast'"),
        ({"tables": [{"title": "t", "header": ["a"], "rows": [["1"], []]}]}, "as many cells"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "r.json").write_text(json.dumps(as_object(results()) | change))
    with pytest.raises(ConfigError, match=message):
        load_results(tmp_path / "r.json")


def test_nan_is_no_number_and_no_end(tmp_path: Path) -> None:
    text = json.dumps(as_object(results()) | {"figures": [{"name": "x", "labels": {}, "value": math.nan}]})
    (tmp_path / "r.json").write_text(text)
    assert load_results(tmp_path / "r.json").figures[0].value is None


def test_commands_name_no_folders_of_the_machine() -> None:
    line = command_line(["bench", "--model=/home/me/m.gguf", "../a/b.jsonl", "--drafters", "eagle:head=~/h/one,k=2"])
    assert line == "forerun bench --model=m.gguf b.jsonl --drafters eagle:head=one,k=2"
    assert command_line(["--drafter", "hybrid:sources=suffix+/h/d.gguf"]).endswith("hybrid:sources=suffix+d.gguf")
    assert command_line(["--model", "owner/name"]) == "forerun --model owner/name"
    assert command_line(["--url", "a=http://b:1/v1"]) == "forerun --url a=http://b:1/v1"
    assert command_line(["--api-key", "x", "--api-key=y", "z"]) == "forerun --api-key KEY --api-key=KEY z"


def test_the_watch_tells_the_time_and_the_load() -> None:
    environment = Watch.begin().environment()
    assert environment.seconds > 0 and environment.date.endswith("Z")
    assert environment.others is None or environment.others >= 0
    assert environment.stolen is None or 0 <= environment.stolen <= 1


LINUX, MACOS, WINDOWS = (
    namedtuple("times", names)  # type: ignore[misc]
    for names in (
        "user nice system idle iowait irq softirq steal guest guest_nice",
        "user nice system idle",
        "user system idle interrupt dpc",
    )
)


@pytest.mark.parametrize(
    ("before", "after", "others", "stolen"),
    [
        (LINUX(*[0] * 10), LINUX(40, 10, 20, 100, 10, 4, 6, 10, 5, 0), 80.0, 0.05),
        (MACOS(0, 0, 0, 0), MACOS(40, 10, 20, 100), 70.0, None),
        (WINDOWS(0, 0, 0, 0, 0), WINDOWS(40, 30, 100, 5, 5), 80.0, None),
    ],
)
def test_what_the_systems_tell_of_processors(
    before: Any, after: Any, others: float, stolen: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = iter((before, after))
    seconds = iter((0.0, 1.0))
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(seen))
    monkeypatch.setattr(provenance.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(provenance, "_own_seconds", lambda: 0.0)
    environment = Watch.begin().environment()
    assert environment.others == others and environment.stolen == stolen
