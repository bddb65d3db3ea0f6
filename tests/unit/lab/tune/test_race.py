"""The race of a few arms: who is shown to be the fastest, how soon, and how often by mistake."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from forerun.engine.results import StepStats
from forerun.lab.tune.arms import PLAIN, Trial, TuningArm, Unit
from forerun.lab.tune.engines import SETTLING, decoding
from forerun.lab.tune.ledger import Ledger
from forerun.lab.tune.outcome import TuningVerdict
from forerun.lab.tune.race import judge_race, race

UNITS = [(number,) for number in range(40)]
TOKENS = 64


class Prompts:
    """Arms whose gain differs from prompt to prompt. spread: of its logarithm; noise: of what a trial takes."""

    def __init__(self, gains: Mapping[str, float], spread: float = 0.15, noise: float = 0.02, seed: int = 0) -> None:
        self.gains, self.spread, self.noise = gains, spread, noise
        self.rng = np.random.default_rng(seed)
        self.of_prompt: dict[tuple[str, Unit], float] = {}
        self.ran: list[TuningArm] = []
        self.clock = 0.0

    def now(self) -> float:
        return self.clock

    def run(self, arm: TuningArm, unit: Unit) -> Trial:
        gain = 1.0
        if arm != PLAIN:
            found = self.of_prompt.setdefault((arm.drafter, unit), self.rng.normal(0, self.spread))
            gain = self.gains[arm.drafter] * float(np.exp(found))
        seconds = 3.0 / gain * float(np.exp(self.rng.normal(0, self.noise)))
        self.ran.append(arm)
        self.clock += seconds
        return Trial(seconds, TOKENS, first_seconds=0.5)


def raced(trials: Prompts, until: float = 120.0) -> tuple[TuningVerdict, Ledger]:
    arms, ledger = [*map(TuningArm, trials.gains)], Ledger()
    race(trials, ledger, arms, UNITS, until)
    return judge_race(ledger, ledger.ranked(arms), TuningArm("suffix")), ledger


@pytest.mark.parametrize("gain", [1.3, 1.6])
def test_a_pair_that_gains_is_shown_to(gain: float) -> None:
    right = [raced(Prompts({"suffix": 1.05, "pair": gain}, seed=seed))[0] for seed in range(20)]
    assert sum((each.answer, each.arm) == ("on", TuningArm("pair")) for each in right) >= 18


def test_what_is_certain_ends_it_early() -> None:
    trials = Prompts({"suffix": 1.05, "pair": 1.6})
    raced(trials)
    assert trials.now() < 100
    trials = Prompts({"suffix": 0.8, "pair": 0.7})
    assert raced(trials)[0].answer == "off" and trials.now() < 100


def test_an_arm_that_is_certainly_not_the_fastest_is_left() -> None:
    trials = Prompts({"suffix": 1.0, "slow": 0.5, "pair": 1.04}, spread=0.05)
    raced(trials)
    slow, pair = (trials.ran.count(TuningArm(name)) for name in ("slow", "pair"))
    assert slow < 6 < pair


def test_the_time_is_kept_and_one_prompt_answered_whatever_it_is() -> None:
    trials = Prompts({"suffix": 1.0, "pair": 1.0}, spread=0.5)
    raced(trials, until=50.0)
    assert trials.now() < 50 + 4 * 3
    trials = Prompts({"suffix": 1.0, "pair": 1.0})
    assert raced(trials, until=0.0)[1].rounds[0].trials.keys() == {TuningArm("suffix"), TuningArm("pair")}


@pytest.mark.slow
def test_looking_after_every_prompt_shows_no_gain_that_is_none() -> None:
    """Two arms, each with an even chance to gain or lose on a prompt."""
    shown = [raced(Prompts({"suffix": 1.0, "pair": 1.0}, spread=0.3, seed=seed))[0].answer for seed in range(200)]
    assert shown.count("on") <= 16  # 5 % of each arm alone, half of them gains


def step(seconds: float, tokens: int = 1, draft: float = 0.0) -> StepStats:
    return StepStats(num_tokens=tokens, time_total=seconds, time_draft=draft)


def test_decoding_begins_when_the_steps_after_the_prompt_have_settled() -> None:
    prompt, settling = [step(9.0, 0), step(8.0)], [step(2.0)] * SETTLING
    seconds, later = decoding([*prompt, *settling, *[step(1.0, 2)] * 5])
    assert seconds == pytest.approx(5) and [each.num_tokens for each in later] == [2] * 5
    assert decoding([*prompt, *settling]) == (2.0 * SETTLING, settling)
    assert decoding(prompt) == (17.0, prompt)


def test_what_a_drafter_took_to_follow_the_prompt_counts() -> None:
    steps = [step(9.0, draft=0.5), step(4.0, draft=3.0), step(1.3, draft=0.3), *[step(1.2, 2, draft=0.2)] * 5]
    seconds, _ = decoding(steps)
    assert seconds == pytest.approx(5 * 1.2 + 0.3 + 2.8 + 0.1)


def test_times_to_the_first_token_are_compared_on_the_same_prompts() -> None:
    ledger = raced(Prompts({"suffix": 1.0}))[1]
    assert ledger.first_token(PLAIN) == ledger.first_token(TuningArm("suffix")) == pytest.approx(0.5)
    for round_ in ledger.rounds[::2]:  # of prompts of which the arm has not answered all
        round_.plain[0] = Trial(3.0, TOKENS, first_seconds=1.0)
        round_.trials[TuningArm("suffix")] = Trial(3.0, TOKENS, first_seconds=2.0)
    for round_ in ledger.rounds[1::2]:
        round_.trials.clear()
    assert ledger.first_token(TuningArm("suffix")) == pytest.approx(2 * ledger.first_token(PLAIN))
