"""The chosen way to decode, with the target's weights in fewer bits: how much faster, and what it loses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from forerun.bench.quality import Scored, compared
from forerun.config import QUANTISATIONS
from forerun.engine import LLM
from forerun.errors import ForerunError
from forerun.tune.arms import PLAIN, Arm, ArmFailedError, Unit
from forerun.tune.engines import EngineTrials
from forerun.tune.intervals import ratio_of_sums
from forerun.tune.outcome import Outcome, Quantised
from forerun.tune.tuning import Task, Watcher, units
from forerun.tune.verdict import FIXED_MARGIN

PROMPTS = 8
"""On which each format is tried, of those for measuring."""


def try_quantised(task: Task, outcome: Outcome, reopen: Callable[[str], LLM], watcher: Watcher) -> None:
    """Measure every format, and mark the one to be written, if one is faster by more than FIXED_MARGIN.

    Args:
        reopen: the target with its weights in a format.
    """
    arm = outcome.verdict.arm
    own = EngineTrials(task.plain, task.requests, task.params)
    chosen = units(range(1, len(task.requests), 2), [1])[:PROMPTS]
    found: list[tuple[float, Quantised]] = []
    for form in QUANTISATIONS:
        watcher.say(f"the target in {form}")
        try:
            other = reopen(form)
            trials = EngineTrials(other, task.requests, task.params)
            plain, before, after = _times(own, trials, arm, chosen)
        except (ForerunError, ArmFailedError) as error:
            outcome.refused[f"weights in {form}"] = str(error)
            continue
        row = compared(task.plain.target, other.target, task.workload, form, _answers(task, own, chosen))
        better = ratio_of_sums(before, after)
        speed = ratio_of_sums(plain, after)
        is_faster = better.low is not None and better.low > FIXED_MARGIN
        quality = (row.lost, row.divergence, row.agreement)
        found.append((speed.median if is_faster else -math.inf, Quantised(form, speed, *quality)))
    best = max((rank for rank, _ in found), default=-math.inf)
    for rank, each in found:
        is_best = rank == best and rank > -math.inf
        shown = (each.speedup, each.perplexity_lost, each.divergence, each.agreement)
        outcome.quantised.append(Quantised(each.number_format, *shown, chosen=is_best))


def _times(
    own: EngineTrials, other: EngineTrials, arm: Arm, chosen: Sequence[Unit]
) -> tuple[list[float], list[float], list[float]]:
    """Seconds per token of plain decoding, of the arm, and of the arm with the other weights, unit by unit."""
    plain, before, after = [], [], []
    for unit in chosen:
        plain.append(own.run(PLAIN, unit).per_token)
        before.append(own.run(arm, unit).per_token if arm != PLAIN else plain[-1])
        other.run(PLAIN, unit)
        after.append(other.run(arm, unit).per_token)
    return plain, before, after


def _answers(task: Task, trials: EngineTrials, chosen: Sequence[Unit]) -> list[Scored]:
    """The target's own answers, on which the formats are compared."""
    scored = []
    for unit in chosen:
        prompt = task.requests[unit.prompts[0]].token_ids
        scored.append(Scored([*prompt, *(trials.text(unit.prompts[0]) or [])], len(prompt)))
    return scored
