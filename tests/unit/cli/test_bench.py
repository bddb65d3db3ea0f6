"""The tables of `forerun bench`."""

from __future__ import annotations

import json
from types import ModuleType

import pytest

from forerun.bench import acceptance_rate, generate, planning_time, step_time
from forerun.bench.acceptance_rate import AcceptanceRow
from forerun.bench.generate import MethodRow
from forerun.bench.measure import Interval
from forerun.bench.report import Table
from forerun.bench.step_time import StepTimeRow
from forerun.cli.bench import shared
from forerun.errors import ConfigError

from .conftest import Invoke


def test_whole_numbers() -> None:
    assert shared.whole_numbers("1, 5,8", "--rows") == [1, 5, 8]
    for text in ("", "1,x", "0", "1,-2", "5,5"):
        with pytest.raises(ConfigError, match="--rows"):
            shared.whole_numbers(text, "--rows")


def test_counts_and_temperatures() -> None:
    assert shared.draft_counts("auto, 4") == ["auto", 4]
    assert shared.non_negative("0,1.5", "--temperatures") == [0, 1.5]


def cells(module: ModuleType, row: object) -> list[str]:
    """The line of its table that a row makes."""
    (line,) = Table.of("", module.COLUMNS, [row]).rows
    return list(line)


def test_lines_of_the_tables() -> None:
    row = MethodRow("m", Interval(66.7, 60, 70), Interval(2, 1.9, 2.1), None, Interval(3, 2.5, 3.5), 2.5, None, 0.9)
    assert cells(generate, row) == ["m", "66.7", "2.00 [1.90, 2.10]", "–", "3.00 [2.50, 3.50]", "2.50", "–", "90 %"]
    assert cells(step_time, StepTimeRow("m", 10, 7, 2, 1)) == ["m", "10.00", "7.00", "2.00", "1.00", "10 %"]
    line = cells(acceptance_rate, AcceptanceRow("code", "draft-model", 4, 1.0, 0.512, 3.04))
    assert line == ["code, draft-model", "4", "1", "0.512", "3.04"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["forward", "--rows", "0"],
        ["forward", "--rounds", "0"],
        ["generate", "--workloads", "no-such"],
        ["generate", "--num-draft-tokens", "a"],
        ["generate", "--num-draft-tokens", "auto,0"],
        ["generate", "--temperatures", "-1"],
        ["generate", "--assisted", "x"],
        ["replay", "--num-draft-tokens", "auto"],
        ["replay", "--workloads", "no-such"],
        ["overhead", "--context", "3"],
        ["generate", "--drafters", "no-such"],
    ],
)
def test_bad_options_exit_with_2(invoke: Invoke, arguments: list[str]) -> None:
    assert invoke("bench", *arguments).exit_code == 2


def test_a_replay_says_whose_costs_it_used(invoke: Invoke) -> None:
    few = ["--drafters", "prompt-lookup", "--workloads", "high-temperature", "--num-draft-tokens", "2"]
    few += ["--prompts", "1", "--max-tokens", "8", "--rounds", "1"]
    result = invoke("bench", "replay", "--cost-of", "bundled-draft", *few)
    assert "bundled at the cost of bundled-draft" in result.stdout
    assert json.loads(invoke("bench", "replay", "--json", *few).stdout)["cost_of"] == "bundled"


def test_the_engines_time_is_printed_as_text_and_as_json(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning_time, "WARMUP", 1)
    monkeypatch.setattr(planning_time, "EVICTED", 8)
    few = ["--vocab-sizes", "50", "--rounds", "2", "--steps", "2"]
    text = invoke("bench", "engine", "--markdown", *few).stdout
    assert "### Choosing K" in text
    assert "### Sampling and verification" in text and "| drawn chain, K = 4 | 50 |" in text
    found = json.loads(invoke("bench", "engine", "--json", *few).stdout)
    assert (
        [row["vocab_size"] for row in found["sampling"]] == [50, 50]
        and len(found["planning"]) == 3
        and "machine" in found
    )
