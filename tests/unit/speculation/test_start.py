"""Policies that begin with costs and acceptance of a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.errors import ConfigError
from forerun.speculation import AcceptanceStats, AutomaticPolicy, automatic_policy
from forerun.speculation.cost_store import entry, prior, read_start, write_start
from worlds import World, live

KEY = ("model", "a drafter of this test")
WORLD = World(
    lambda s, t, d: 0.95, lambda num_draft_tokens, asked: 0.05 * num_draft_tokens, lambda rows: 1 + 0.01 * rows
)


def learned() -> AutomaticPolicy:
    policy = AutomaticPolicy()
    live(WORLD, policy, 300)
    return policy


def test_acceptance_is_taken_over_with_the_weight_of_a_few_trials(tmp_path: Path) -> None:
    policy = learned()
    write_start(tmp_path / "s.json", [entry(KEY, policy.costs, policy.acceptance)])
    read_start(tmp_path / "s.json")
    known, fresh = prior(KEY), AcceptanceStats()
    assert prior(("model", "another")).expect_one(0, 4) == fresh.expect_one(0, 4)
    before = known.expect_one(0, 8)[0]
    assert before[3] > fresh.expect_one(0, 8)[0][3] + 0.2
    for _ in range(60):
        known.observe(0, 4, 4, [])
    assert known.expect_one(0, 8)[0][0] < 0.5 * before[0]


def test_the_first_steps_are_as_good_as_later_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_COST_CACHE", "0")
    key = ("model", "first steps")
    policy = learned()
    write_start(tmp_path / "s.json", [entry(key, policy.costs, policy.acceptance)])
    read_start(tmp_path / "s.json")
    warm = live(WORLD, automatic_policy(fixed_length_draft=None, cost_key=key), 20).speed()
    cold = live(WORLD, AutomaticPolicy(), 20).speed()
    later = live(WORLD, learned(), 100).speed()
    assert warm > 1.05 * cold and warm > 0.85 * later


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"version": 2, "entries": []}',
        '{"version": 1, "entries": [{}]}',
        '{"version": 1, "entries": [{"setting": "a", "costs_setting": "b", "costs": {}, "acceptance": [[1]]}]}',
        "not json",
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(ConfigError, match=r"s\.json"):
        read_start(tmp_path / "s.json")


def test_a_file_that_is_not_there_is_told_with_what_writes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file or directory\. Give a start file that forerun tune wrote\."):
        read_start(tmp_path / "s.json")


@pytest.mark.parametrize("value", [-1, 1e12, "x"])
def test_counts_that_cannot_be_are_refused(tmp_path: Path, value: object) -> None:
    policy = learned()
    made = entry(KEY, policy.costs, policy.acceptance)
    made["acceptance"][0][0][0] = value
    (tmp_path / "s.json").write_text(json.dumps({"version": 1, "entries": [made]}))
    with pytest.raises(ConfigError, match="damaged"):
        read_start(tmp_path / "s.json")


def test_an_empty_history_is_a_beginning() -> None:
    acceptance = AcceptanceStats()
    acceptance.restore(AcceptanceStats().state())
    assert acceptance.expect_one(0, 4) == AcceptanceStats().expect_one(0, 4)
