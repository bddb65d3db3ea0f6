"""Tuning from prompts to an outcome: what fits, the search on one half, the measurement on the other.

Time is shared out beforehand: half of it for the choice, a third for the measurement. Ctrl-C and the end of the time
end it wherever it is, and what is known then is the outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from forerun.config import SamplingParams
from forerun.drafters.build import automatic_drafter
from forerun.engine import LLM
from forerun.errors import ConfigError
from forerun.lab.bench.prompts import BenchPrompt
from forerun.lab.tune.arms import LEAST_PROMPTS, PLAIN, OutOfTimeError, TuningArm, Unit
from forerun.lab.tune.candidates import candidates, first_arms, further_arms
from forerun.lab.tune.engines import EngineTrials
from forerun.lab.tune.outcome import TuningOutcome, TuningVerdict, confirm, judge
from forerun.lab.tune.race import judge_race, race
from forerun.lab.tune.search import search

SELECTION_SHARE, REPORT_SHARE = 0.5, 0.85
"""Of the time, when the search ends and when the measurement does."""
FIRST_SHARE, MOST_AT_FIRST = 0.3, 3
"""Share of the search's time that the first round may take, and prompts of it at most."""


class Watcher(Protocol):
    """Receives reports of progress."""

    def say(self, text: str) -> None:
        """Report that a stage begins."""

    def tick(self, seconds: float) -> None:
        """Report that so many seconds have passed."""


@dataclass(frozen=True, slots=True)
class Task:
    """The target, prompts and time of a tuning run.

    Attributes:
        plain: the target without a drafter.
        model: its name.
        requests: the prompts, categories in turn.
        workload: the name of the prompts.
        params: of all answers.
        seconds: to spend.
        levels: requests at once.
        drafters: texts to try; empty: all that fit. draft: a draft model for whichever takes one.
        quick: only what is likely the fastest is tried, with K chosen step by step, on all prompts, and prompts' time
            does not count.
    """

    plain: LLM
    model: str
    requests: Sequence[BenchPrompt]
    workload: str
    params: SamplingParams
    seconds: float
    levels: Sequence[int] = (1,)
    drafters: Sequence[str] = ()
    draft: str | None = None
    quick: bool = False


def check_requests(requests: Sequence[BenchPrompt], place: str, levels: Sequence[int]) -> None:
    """Raise ConfigError where there are too few prompts to choose by some and measure on others."""
    if len(requests) < LEAST_PROMPTS:
        raise ConfigError(
            f"{place} holds {len(requests)} prompt{'' if len(requests) == 1 else 's'}, but one half is tuned on and "
            f"the other measured on, so at least {LEAST_PROMPTS} are needed; 20 or more give narrow intervals."
        )
    if max(levels) > len(requests) // 2:
        raise ConfigError(
            f"--load asks for {max(levels)} requests at once, but half of the {len(requests)} prompts of {place} are "
            f"{len(requests) // 2}. Give more prompts, or a smaller load."
        )


def find_fastest(task: Task, watcher: Watcher) -> TuningOutcome:
    """Find the fastest drafter and K within the time.

    Raises:
        ConfigError: the time does not suffice for a single comparison.
    """
    outcome = TuningOutcome(task.requests, task.workload, task.params.temperature, only_decoding=task.quick)
    trials = EngineTrials(task.plain, task.requests, task.params, task.seconds, only_decoding=task.quick)
    try:
        (_race if task.quick else _stages)(task, trials, outcome, watcher)
    except (KeyboardInterrupt, OutOfTimeError) as reason:
        outcome.interrupted = isinstance(reason, KeyboardInterrupt)
        if not outcome.interrupted and not outcome.is_measured:
            raise ConfigError(
                f"{task.seconds / 60:.2g} minutes are too short: they were over before a drafter had answered. "
                "Give `forerun tune` more --minutes, or fewer --max-tokens."
            ) from None
        if not task.quick:  # which has judged already
            _judge_what_is_known(outcome)
    return outcome


def units(prompts: Sequence[int], levels: Sequence[int]) -> list[Unit]:
    """Group the prompts into units, one of each level in turn; at each level, all prompts that fill a unit."""
    by_level = [
        [tuple(prompts[start : start + level]) for start in range(0, len(prompts) - level + 1, level)]
        for level in levels
    ]
    longest = max(map(len, by_level))
    return [column[row] for row in range(longest) for column in by_level if row < len(column)]


def _race(task: Task, trials: EngineTrials, outcome: TuningOutcome, watcher: Watcher) -> None:
    watcher.say("looking for drafters")
    texts, outcome.refused = candidates(task.model, task.drafters, task.draft, trials.drafter, quick=True)
    outcome.default = _default(task, texts)
    arms = [*map(TuningArm, texts)]
    ledger = outcome.report
    try:
        every = units(range(len(task.requests)), task.levels)
        race(trials, ledger, arms, every, task.seconds, watcher.say, lambda _: watcher.tick(trials.now()))
    finally:  # of an interrupt, too: what is known is judged
        outcome.finalists = ledger.ranked(arms)
        outcome.verdict = judge_race(ledger, outcome.finalists, outcome.default)


def _default(task: Task, texts: Sequence[str]) -> TuningArm:
    """Return what runs where nobody chooses; PLAIN where it cannot be tried."""
    return next((TuningArm(text) for text in texts if text == automatic_drafter(task.model)), PLAIN)


def _stages(task: Task, trials: EngineTrials, outcome: TuningOutcome, watcher: Watcher) -> None:
    prompts = range(len(task.requests))
    first = units(prompts[::2], task.levels)
    last = units(prompts[1::2], task.levels)

    def after(_: TuningArm) -> None:
        watcher.tick(trials.now())

    watcher.say("plain decoding")
    taken = _check_time(trials, first[0], task.seconds)
    watcher.say("looking for drafters")
    texts, outcome.refused = candidates(task.model, task.drafters, task.draft, trials.drafter)
    arms = first_arms(texts)
    until = SELECTION_SHARE * task.seconds
    count = int(FIRST_SHARE * until / max(1, len(arms)) / taken)
    outcome.default = _default(task, texts)
    found = search(
        trials, outcome.search, arms, first, until, further_arms, watcher.say, after, max(1, min(count, MOST_AT_FIRST))
    )
    outcome.finalists = [arm for arm in dict.fromkeys([*found, outcome.default]) if arm != PLAIN]
    if found:
        until = REPORT_SHARE * task.seconds
        confirm(trials, outcome.report, outcome.finalists, last, until, outcome.default, watcher.say, after)
    outcome.verdict = judge(outcome.report, outcome.finalists, outcome.default)


def _check_time(trials: EngineTrials, unit: Unit, seconds: float) -> float:
    """Return the seconds of one trial of plain decoding; raise ConfigError where an arm beside it would exceed the
    time."""
    taken = trials.run(PLAIN, unit).seconds
    if 4 * taken > seconds:  # plain and one arm, to choose by and to measure
        raise ConfigError(
            f"{seconds / 60:.2g} minutes are too short: one answer takes {taken:.1f} seconds, and the shortest "
            f"comparison four of them. Give `forerun tune` --minutes {4 * taken / 60:.2g} at least, or --max-tokens."
        )
    return taken


def _judge_what_is_known(outcome: TuningOutcome) -> None:
    """Judge what is complete: by the prompts for measuring where there are trials, else by those for choosing."""
    if outcome.report.rounds:
        outcome.verdict = judge(outcome.report, outcome.finalists, outcome.default)
        return
    # the fastest of many looks faster than it is, so that nothing but the default is judged by these
    verdict = judge(outcome.search, [outcome.default], outcome.default)
    why = "Interrupted" if outcome.interrupted else "The time was up"
    outcome.verdict = TuningVerdict(
        verdict.answer, verdict.arm, f"{why} while arms were chosen, so this is not confirmed. {verdict.reason}"
    )
