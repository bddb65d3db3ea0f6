"""What the automatic budget takes a step, `plan` and `observe` together, where nothing else is computed.

The budget lives in a simulated engine: acceptances are drawn, seconds are counted. Between two steps a buffer larger
than the inner caches is read, since a forward would have left nothing of the budget in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import thread_time

import numpy as np

from forerun.bench.report import Columns
from forerun.config import SamplingParams
from forerun.policy import AutoBudget, Budget, Outcome, StepCost
from forerun.types import Draft, Sequence as Tokens, Verdict

WARMUP = 200
"""Steps before those that are timed: budgets settle in them."""
EVICTED = 2**24
"""Bytes read between two steps."""
LENGTH = 512
"""Tokens of each sequence."""


@dataclass(frozen=True, slots=True)
class Situation:
    """A batch of sequences, the acceptance of every node whose parent was accepted, and seconds a drafted node."""

    name: str
    batch: int
    acceptance: float
    node: float


SITUATIONS = (
    Situation("one sequence, drafting", 1, 0.8, 0.05),
    Situation("one sequence, K = 0 stands", 1, 0.0, 0.3),
    Situation("batch of 8, drafting", 8, 0.7, 0.05),
)


@dataclass(frozen=True, slots=True)
class PlanningRow:
    """One situation. Times in milliseconds of the calling thread's processor time.

    Attributes:
        situation: its name.
        step: mean of plan and observe, the median of the rounds.
        slowest: the 99th percentile of all steps.
        num_draft_tokens: mean K.
    """

    situation: str
    step: float
    slowest: float
    num_draft_tokens: float


COLUMNS: Columns[PlanningRow] = {
    "situation": lambda row: row.situation,
    "plan and observe in ms": lambda row: f"{row.step:.4f}",
    "99 %": lambda row: f"{row.slowest:.4f}",
    "K": lambda row: f"{row.num_draft_tokens:.1f}",
}


def measure(
    steps: int = 500,
    rounds: int = 5,
    situations: Sequence[Situation] = SITUATIONS,
    new: Callable[[], Budget] = AutoBudget,
) -> list[PlanningRow]:
    """One row per situation; the rounds are interleaved.

    Args:
        steps: timed steps in each round.
        new: a fresh budget.
    """
    runs = [[_run(situation, new(), steps, seed) for situation in situations] for seed in range(rounds)]
    rows = []
    for situation, measured in zip(situations, zip(*runs, strict=True), strict=True):
        times = [1e3 * np.array(seconds) for seconds, _ in measured]
        step = float(np.median([each.mean() for each in times]))
        slowest = float(np.quantile(np.concatenate(times), 0.99))
        rows.append(PlanningRow(situation.name, step, slowest, float(np.mean([budgets for _, budgets in measured]))))
    return rows


def _run(situation: Situation, budget: Budget, steps: int, seed: int) -> tuple[list[float], float]:
    """Seconds of every timed step, and mean K in them."""
    rng = np.random.default_rng(seed)
    buffer = np.zeros(EVICTED // 8)
    params = SamplingParams(temperature=0)
    running: list[Tokens] = []
    times: list[float] = []
    drafted = 0
    for number in range(WARMUP + steps):
        while len(running) < situation.batch:
            running.append(Tokens(number, [0], 1, params, max_length=1 + LENGTH))
        buffer.sum()
        started = thread_time()
        budgets = budget.plan(running).budgets
        planned = thread_time() - started
        outcomes = [_outcome(each, k, situation.acceptance, rng) for each, k in zip(running, budgets, strict=True)]
        rows, context = sum(budgets) + len(running), sum(len(each.token_ids) for each in running)
        blur = float(np.exp(0.03 * rng.standard_normal()))
        cost = StepCost(rows, 0, context, situation.node * max(budgets) * blur, (1 + 0.01 * rows) * blur, 0.0)
        buffer.sum()
        started = thread_time()
        budget.observe(cost, outcomes)
        if number >= WARMUP:
            times.append(planned + thread_time() - started)
            drafted += sum(budgets)
        for outcome in outcomes:
            outcome.sequence.token_ids += [0] * (len(outcome.verdict.path) + 1)
        for ended in [each for each in running if each.room < 0]:
            budget.stop(ended)
            running.remove(ended)
    return times, drafted / (steps * situation.batch)


def _outcome(sequence: Tokens, budget: int, acceptance: float, rng: np.random.Generator) -> Outcome:
    path: list[int] = []
    while len(path) < budget and rng.random() < acceptance:
        path.append(len(path))
    draft = Draft.chain([0] * budget) if budget else Draft.empty()
    return Outcome(sequence, budget, draft, Verdict(path, 0))
