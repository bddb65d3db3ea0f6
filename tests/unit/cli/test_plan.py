"""`forerun plan`."""

from __future__ import annotations

import json

import pytest

from forerun.cli import plan as command
from forerun.speculation.predictor import CostsByK

from .conftest import Invoke

LLAMA = ("plan", "70B:layers=80,kv_heads=8,head_dim=128", "--draft", "1B", "--machine", "h100")


def test_a_plan_is_told_to_people(invoke: Invoke) -> None:
    result = invoke(*LLAMA, "--acceptance", "0.75", "--context", "4096", "--price", "3")
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert "70 B parameters" in text and "a bound" in text
    assert "target 140.0 GB in bfloat16, cache 1.3 GB; draft 2.0 GB in bfloat16" in text
    assert "does not fit: 143.3 GB wanted, 80.0 GB there" in text
    assert "at least 42.19 ms a token" in text and "for a million tokens" in text
    assert "\n4 " in text and "3.05" in text
    assert "Best: K=" in text


def test_a_plan_is_told_to_programs(invoke: Invoke) -> None:
    made = json.loads(invoke(*LLAMA, "--acceptance", "0.8,0.5", "--json").stdout)
    assert made["source"] == "bound" and made["acceptance"] == [0.8, 0.5]
    assert [each["num_draft_tokens"] for each in made["by_num_draft_tokens"]] == [*range(1, 17)]
    assert made["by_num_draft_tokens"][1]["tokens"] == pytest.approx(1 + 0.8 + 0.4)


def test_a_machine_may_be_given_by_its_figures(invoke: Invoke) -> None:
    flags = ("--bandwidth", "100", "--flops", "1", "--memory", "16")
    made = json.loads(invoke("plan", "1B", *flags, "--json").stdout)
    assert made["costs"]["plain"] == pytest.approx(2e9 / 100e9)
    assert made["memory"]["available"] == 16e9


def test_where_nothing_pays_it_says_from_where_on_something_would(invoke: Invoke) -> None:
    text = invoke("plan", "1B", "--draft", "800M", "--machine", "h100", "--acceptance", "0.3").stdout
    assert "No K is faster than plain decoding here: speculation pays from an acceptance of 0.80 on." in text


def test_measured_steps_take_the_rooflines_place(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = CostsByK(0.01, [0.01, 0.01, 0.01], [0.0, 0.001, 0.002], [0.0] * 3)
    monkeypatch.setattr(command, "measured_here", lambda *_: costs)
    made = json.loads(invoke("plan", "12M", "--draft", "1M", "--measure", "--json").stdout)
    assert made["source"] == "measured" and made["costs"]["plain"] == 0.01
    assert len(made["by_num_draft_tokens"]) == 2


def test_the_draft_is_what_auto_takes(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"m": ["/a,b"], "bundled-other-vocab": ["bundled-draft"]}
    monkeypatch.setattr("forerun.drafters.build._best", lambda target: found.get(target, []))
    assert [command.found_draft(name) for name in ("bundled", "m", "1B")] == ["bundled-draft", "/a,b", "none"]
    planned = json.loads(invoke("plan", "bundled-other-vocab", "--machine", "h100", "--json").stdout)
    assert planned["draft"]["name"] == "bundled-draft"


def test_step_times_measured_elsewhere(invoke: Invoke) -> None:
    times = ("--step-ms", "0=85", "--step-ms", "4=250")
    result = invoke("plan", "2B", "--acceptance", "0.9", *times)
    assert result.exit_code == 0, result.output
    *_, row, _, verdict = result.stdout.splitlines()
    assert row.split()[:4] == ["4", "4.10", "250.00", "1.39"] and "given as step_ms" in result.stdout
    assert verdict.startswith("Best: K=4, 1.39 times plain decoding")
    made = json.loads(invoke("plan", "2B", "--acceptance", "0.9", *times, "--json").stdout)
    assert made["source"] == "given" and made["costs"]["plain"] == 0.085
    assert [each["num_draft_tokens"] for each in made["by_num_draft_tokens"]] == [4]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["1B", "--machine", "hal"], "not in the table"),
        (["1B", "--bandwidth", "3"], "describe a machine together"),
        (["1B", "--memory", "3"], "--memory goes with"),
        (["1B", "--machine", "h100", "--bandwidth", "3", "--flops", "2"], "describe a machine together"),
        (["1B", "--machine", "h100", "--acceptance", "1.5"], "must be numbers from 0 to 1"),
        (["1B", "--machine", "h100", "--acceptance", "much"], "--acceptance is 'much'"),
        (["1B", "--machine", "h100", "--measure"], "another one is given"),
        (["1B", "--measure", "--batch", "4"], "steps of one sequence"),
        (["1B", "--measure", "--step-ms", "0=9", "--step-ms", "2=10"], "Leave one out"),
        (["1B", "--step-ms", "2=10"], "of a plain step, 0=MS"),
        (["1B", "--step-ms", "0=9", "--step-ms", "2=-1"], "milliseconds above 0"),
        (["1B", "--machine", "h100", "--draft", "eagle"], "can only be measured"),
        (["1B", "--machine", "h100", "--precision", "int2"], "--precision is 'int2'"),
    ],
)
def test_what_cannot_be_planned_is_refused(invoke: Invoke, flags: list[str], told: str) -> None:
    result = invoke("plan", *flags)
    assert result.exit_code == 2
    assert told in result.stderr
