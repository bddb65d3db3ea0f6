"""Replays of a server's traffic: against what is known to have happened, and what would have."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import traffic_world
from forerun.bench.journal.prices import Prices, Work, non_negative_fit
from forerun.bench.journal.queue import Request, replay
from forerun.bench.journal.scenarios import OtherDrafter, Scenarios
from forerun.bench.journal.summary import make_report
from forerun.bench.report import Report
from forerun.bench.summary.series import charts
from forerun.bench.summary.text import markdown
from forerun.errors import ConfigError
from forerun.results import Figure, PromptFacts, Results, RunRow
from forerun.traffic.reader import Traffic, read_journal
from measured import QUIET, generated

WORLD = traffic_world.made()


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Traffic:
    return read_journal(traffic_world.written(tmp_path_factory.mktemp("traffic") / "j", WORLD))


def figures(report: Report, name: str) -> dict[tuple[str, str], Figure]:
    return {
        (str(each.labels["method"]), str(each.labels.get("category", ""))): each
        for each in report.figures
        if each.name == name
    }


def decoding(replayed: object) -> float:
    return sum(each.seconds - each.first for run in replayed for each in run.served)  # type: ignore[attr-defined]


def test_the_replay_tells_what_happens_without_speculation(traffic: Traffic) -> None:
    scenarios = Scenarios.of(traffic)
    (plain,) = scenarios.plain()
    assert plain.busy == pytest.approx(WORLD.plain.busy, rel=0.02)
    truth = sum(each.seconds - each.first for each in WORLD.plain.served)
    assert decoding([plain]) == pytest.approx(truth, rel=0.03)


def test_it_tells_its_own_error(traffic: Traffic) -> None:
    report = make_report(traffic, None, {})
    (missed,) = figures(report, "replay_error").values()
    assert missed.value is not None and abs(missed.value) < 0.03
    ratios = figures(report, "over_plain")
    for category in ("", "code", "prose"):
        ratio = ratios["as it was", category]
        assert ratio.low is not None and ratio.high is not None and ratio.value is not None
        assert ratio.low <= ratio.value <= ratio.high
    truth = sum(each.seconds - each.first for each in WORLD.plain.served)
    measured = sum(each.seconds - each.first for each in WORLD.answers)
    assert ratios["as it was", ""].value == pytest.approx(truth / measured, rel=0.04)
    assert (ratios["as it was", "code"].value or 0) > 1.5 and (ratios["as it was", "prose"].value or 2) < 1


def test_a_machine_that_changes_its_pace_widens_the_error(traffic: Traffic) -> None:
    """Answers of the second half took longer than their steps say."""
    slow = [replace(each, seconds=each.seconds * (2 if each.at > 30 else 1)) for each in traffic.answers]
    run = replace(traffic.runs[0], answers=slow)
    (missed,) = figures(make_report(replace(traffic, runs=[run]), None, {}), "replay_error").values()
    assert missed.value is not None and missed.value < -0.15


def tuned(*, chosen: str = "eagle, auto", kind: str = "tune") -> Results:
    """Plain decoding at 20 ms a token; eagle gives 4 tokens a step of 30 ms on code, 2 of 40 ms on what has no name."""
    prompts = [PromptFacts("a", "mine", "code", 10), PromptFacts("b", "mine", "", 10)]
    rows = []
    for prompt, (per_step, seconds) in enumerate(((4, 0.03), (2, 0.04))):
        rows.append(RunRow(prompt, "plain", "", 0.0, 0, 101, 0.1 + 100 * 0.02, 101, first_token=0.1))
        forwards = 1 + 100 // per_step
        rows.append(
            RunRow(prompt, "eagle, auto", "eagle", 0, 0, 101, 0.1 + (forwards - 1) * seconds, forwards, first_token=0.1)
        )
    return Results(kind, "forerun tune", QUIET, prompts=prompts, rows=rows, details={"chosen": chosen}, source="t.json")


def test_another_drafter_by_a_tuning(traffic: Traffic) -> None:
    drafter = OtherDrafter.of(tuned(), None)
    assert drafter.pace("code").per_step == 4 and drafter.pace("code").cost == pytest.approx(1.5)
    everything = drafter.pace("prose")
    assert everything == drafter.pace("") and everything.prompts == 2
    report = make_report(traffic, drafter, {})
    assert 1.2 < (figures(report, "over_plain")["eagle, auto", "code"].value or 0) < 4 / 1.5, "steps are shared"
    assert "eagle, auto, by replay" in markdown([report.results("forerun bench journal j", QUIET)])


def test_another_drafter_where_requests_come_alone(tmp_path: Path) -> None:
    path = traffic_world.written(tmp_path / "j", traffic_world.made(30, gap=200.0))
    ratios = figures(make_report(read_journal(path), OtherDrafter.of(tuned(), None), {}), "over_plain")
    assert ratios["eagle, auto", "code"].value == pytest.approx(4 / 1.5, rel=0.08), "but for two that meet"


@pytest.mark.parametrize(
    ("results", "arm", "reason"),
    [
        (tuned(kind="generate"), None, "not of a tuning"),
        (tuned(chosen="plain"), None, "plain decoding won there.*--arm: 'eagle, auto'"),
        (tuned(), "x", "no arm 'x'"),
        (replace(tuned(), rows=[replace(row, num_forwards=1) for row in tuned().rows]), None, "several tokens"),
    ],
)
def test_tunings_that_tell_nothing(results: Results, arm: str | None, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        OtherDrafter.of(results, arm)


def test_the_charts(traffic: Traffic) -> None:
    found = charts(make_report(traffic, None, {}).results("forerun bench journal j", QUIET))
    assert [each.title for each in found] == [
        "Speed over plain decoding",
        "Acceptance by category",
        "Acceptance by draft position",
        "Time to first token, waiting included",
        "Time from token to token",
        "Time of a step",
        "What was decided about drafting",
    ]
    assert all(each.value_title and each.caption for each in found)
    assert charts(generated())


def test_prices_are_never_negative_and_follow_their_law() -> None:
    prices = Prices.of(WORLD.steps, drafts=True)
    assert all(each >= 0 for part in prices.coefficients.values() for each in part)
    for work in (Work(1, 0, 0, 200), Work(3, 12, 0, 500), Work(2, 0, 64, 300)):
        assert prices(work) == pytest.approx(traffic_world.law(work), rel=0.06)
    assert prices.plain(Work(3, 12, 0, 500)) == pytest.approx(traffic_world.law(Work(3, 0, 0, 500, False)), rel=0.06)


def test_the_fit() -> None:
    table = np.array([[1.0, 1, 0], [1, 2, 0], [1, 3, 0]])
    assert non_negative_fit(table, np.array([3.0, 5, 7])) == pytest.approx([1, 2, 0], abs=1e-6)
    falling = non_negative_fit(table, np.array([3.0, 2, 1]))
    assert falling[1] == 0 and falling[0] == pytest.approx(2)


def test_a_queue_that_is_known() -> None:
    """Two requests, one place: the second waits for the first; a step takes a second whatever it does."""
    two = [Request(0.0, 4, 4, 3, 1.0, 0.0), Request(1.0, 8, 8, 5, 2.0, 1.0)]
    found = replay(two, lambda _: 1.0, 1, lambda _: 4.0)
    assert [(each.first, each.seconds) for each in found.served] == [(1, 3), (4, 6)]
    assert found.busy == 7
    both = replay(two, lambda _: 1.0, 2, lambda _: 4.0)
    assert [(each.first, each.seconds) for each in both.served] == [(1, 3), (2, 4)] and both.busy == 5


def test_damage_is_an_error_or_a_figure(tmp_path: Path) -> None:
    """Whatever stands in the file, nothing else is raised, and nothing hangs."""
    rng = random.Random(7)
    path = traffic_world.written(tmp_path / "j", traffic_world.made(6))
    whole = path.read_bytes()
    for _ in range(30):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.choice(b'0123456789-.eE,:[]{}"naN \n\xff')
        path.write_bytes(damaged)
        with suppress(ConfigError):
            make_report(read_journal(path), None, {})


def test_a_journal_without_a_drafter(tmp_path: Path) -> None:
    bare = [
        replace(each, drafter="none", drafted=0, reached=[], accepted_at=[], forwards=each.tokens)
        for each in WORLD.answers
    ]
    steps = [each for each in WORLD.steps if not each.drafted]
    path = traffic_world.written(tmp_path / "j", replace(WORLD, answers=bare, steps=steps), drafter="none")
    report = make_report(read_journal(path), None, {})
    assert figures(report, "over_plain")["as it was", ""].value == pytest.approx(1, rel=0.01) and not report.drafters
