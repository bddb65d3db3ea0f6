"""Tuning in real engines, over a target that costs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from doubles import FakeModel
from forerun import LLM, SamplingParams
from forerun.drafters import PromptLookup
from forerun.errors import ConfigError
from forerun.lab.bench.measure import Interval
from forerun.lab.bench.prompts import BenchPrompt
from forerun.lab.results.files import as_object, load_results, save_results
from forerun.lab.tune.arms import PLAIN, TuningArm
from forerun.lab.tune.engines import EngineTrials
from forerun.lab.tune.ledger import Ledger
from forerun.lab.tune.tuning import Task, check_requests, find_fastest, units

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
REQUESTS = [BenchPrompt(f"prompt {n}", "", [5, 3, 8, 5, 3, 8, 5, n]) for n in range(8)]


class Quiet:
    """Nobody watches."""

    def say(self, text: str) -> None: ...

    def tick(self, seconds: float) -> None: ...


def task(seconds: float = 20.0, drafters: tuple[str, ...] = ("prompt-lookup", "suffix"), **changes: Any) -> Task:
    model: Any = FakeModel(order=1)
    made = {"levels": [1], "draft": None, "requests": REQUESTS} | changes
    return Task(LLM(model, None), "fake", workload="w", params=PARAMS, drafters=drafters, seconds=seconds, **made)


class Late(Quiet):
    """Sees the first trial end."""

    over = False

    def tick(self, seconds: float) -> None:
        self.over = True


class Breaking(PromptLookup):
    """Fails when it has drafted a few times."""

    count = 0

    def draft(self, *arguments: Any, **more: Any) -> Any:
        Breaking.count += 1
        if Breaking.count > 20:
            raise RuntimeError("a secret of the prompt")
        return super().draft(*arguments, **more)


def test_all_of_it_from_prompts_to_an_outcome(tmp_path: Path) -> None:
    outcome = find_fastest(task(drafters=("prompt-lookup", "suffix", "eagle")), Quiet())
    assert "eagle" in outcome.refused
    assert outcome.finalists and {round_.unit[0] % 2 for round_ in outcome.report.rounds} == {1}
    assert {round_.unit[0] % 2 for round_ in outcome.search.rounds} == {0}
    assert all(trial.same_text for arm in outcome.finalists for trial in outcome.report.trials(arm))
    facts = outcome.results("forerun tune", _target(), _environment(), {"minutes": 1.0})
    save_results(facts, tmp_path / "r.json")
    read = load_results(tmp_path / "r.json")
    assert read.kind == "tune" and len(read.rows) == len(facts.rows) > 0
    assert {figure.name for figure in read.figures} == {"over_plain"}
    assert as_object(read)["details"]["verdict"] == outcome.verdict.answer
    assert all(len(row) == len(table.header) for table in outcome.tables() for row in table.rows)


def test_a_drafter_that_breaks_is_told_without_its_text_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Breaking, "count", 0)
    outcome = find_fastest(task(drafters=(f"{__name__}:Breaking", "suffix")), Quiet())
    broken = {arm.drafter: reason for arm, reason in outcome.failed.items()}
    assert f"{__name__}:Breaking" in broken  # hybrids with it are tried too where there is time
    assert all("Breaking" in drafter for drafter in broken)
    assert "failed" in str(broken) and "secret" not in str(broken)
    assert {arm.drafter for arm in outcome.finalists} == {"suffix"}


def test_the_default_is_measured_beside_what_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = find_fastest(task(drafters=("prompt-lookup", "recycling")), Quiet())
    assert outcome.default == TuningArm("suffix") and outcome.default in outcome.finalists
    assert outcome.report.trials(outcome.default)


def test_where_the_time_is_up_while_arms_are_chosen_only_the_default_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "speedup", lambda *_, **__: Interval(2.0, 1.9, 2.1))  # all look fast
    late = Late()
    monkeypatch.setattr(EngineTrials, "now", lambda _: 1.01 * 20 if late.over else 0.0)
    outcome = find_fastest(task(20.0, drafters=("prompt-lookup", "suffix")), late)
    assert outcome.verdict.arm == TuningArm("suffix") and "not confirmed" in outcome.verdict.reason


def test_ctrl_c_leaves_what_is_known() -> None:
    class Impatient(Quiet):
        count = 0

        def tick(self, seconds: float) -> None:
            self.count += 1
            if self.count == 3:
                raise KeyboardInterrupt

    outcome = find_fastest(task(), Impatient())
    assert outcome.interrupted and len(outcome.search.rounds) == 1
    assert "Interrupted" in outcome.verdict.reason
    assert outcome.tables()[0].rows


def test_a_time_too_short_for_one_comparison_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"1e-08 minutes are too short: they were over .* --minutes"):
        find_fastest(task(seconds=6e-7), Quiet())
    monkeypatch.setattr(EngineTrials, "now", lambda _: 0.0)
    with pytest.raises(ConfigError, match=r"1e-08 minutes are too short: one answer takes .* --minutes"):
        find_fastest(task(seconds=6e-7), Quiet())


def test_the_end_of_the_time_gives_up_the_trial_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    late, seconds = Late(), 20.0
    monkeypatch.setattr(EngineTrials, "now", lambda _: 1.01 * seconds if late.over else 0.0)
    outcome = find_fastest(task(seconds), late)
    assert not outcome.interrupted and outcome.tables()[0].rows
    assert "The time was up while arms were chosen" in outcome.verdict.reason


@pytest.mark.parametrize(("count", "told"), [(0, "0 prompts"), (1, "1 prompt,"), (3, "3 prompts")])
def test_too_few_prompts_are_refused(count: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_requests(REQUESTS[:count], "file.jsonl", [1])


def test_a_load_beyond_the_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match="8 requests at once"):
        check_requests(REQUESTS, "file.jsonl", [1, 8])


def test_levels_of_load_come_in_turn() -> None:
    assert units(range(0, 8, 2), [1, 2]) == [
        (0,),
        (0, 2),
        (2,),
        (4, 6),
        (4,),
        (6,),
    ]


def test_several_requests_at_once_are_one_trial() -> None:
    one = task()
    trials = EngineTrials(one.plain, REQUESTS, PARAMS)
    plain, drafted = (trials.run(arm, (0, 1, 2)) for arm in (PLAIN, TuningArm("suffix", 4)))
    assert plain.num_tokens == drafted.num_tokens == 3 * 24
    assert drafted.same_text and drafted.num_forwards < plain.num_forwards
    outcome = find_fastest(task(levels=[1, 2]), Quiet())
    assert outcome.levels() == [1, 2]
    assert any("at 2 requests" in table.header for table in outcome.tables())


def test_what_drafts_cost_is_known_before_an_arm_is_tried_as_in_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("forerun.lab.tune.engines.calibrate", lambda _, drafter: seen.append(drafter))
    trials = EngineTrials(task().plain, REQUESTS, PARAMS)
    trials.run(TuningArm("suffix"), (0,))
    trials.run(TuningArm("suffix", 4), (0,))  # chooses nothing by costs
    assert seen == [trials.drafter("suffix")]


def _environment() -> Any:
    from forerun.kernels.provenance import Watch

    return Watch.begin().environment()


def _target() -> Any:
    from forerun.lab.results.schema import TargetFacts

    return TargetFacts("fake", "float32")
