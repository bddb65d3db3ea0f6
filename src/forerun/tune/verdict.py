"""What is written in the end: a drafter with K, or none; from units that had no part in the choice of the finalists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from forerun.bench.measure import Interval
from forerun.tune.arms import PLAIN, Arm, Trials, Unit
from forerun.tune.ledger import Ledger, run_heat
from forerun.tune.search import can_win

FIXED_MARGIN = 1.02
"""A fixed K is chosen only if its lower bound over the choice of K step by step exceeds this: it cannot adapt to other
prompts than those that were tried."""
_MARGIN = f"{100 * (FIXED_MARGIN - 1):.0f} %"
WORTH = 1.02
"""An arm whose upper bound over plain decoding is below this gains nothing that would be noticed."""
ROUNDS = 3
"""Times that each unit is measured at most."""

Answer = Literal["on", "off", "tie"]
"""Speculation is faster; it is not; or a difference could not be shown."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The choice.

    Attributes:
        answer: whether to speculate.
        arm: what to run: PLAIN unless the answer is "on".
        reason: in words.
    """

    answer: Answer
    arm: Arm
    reason: str


def confirm(
    trials: Trials,
    ledger: Ledger,
    arms: Sequence[Arm],
    units: Sequence[Unit],
    until: float,
    say: Callable[[str], None] = lambda _: None,
    after: Callable[[Arm], None] = lambda _: None,
) -> None:
    """Measure the finalists on the units in turn, until the time is up or none of them can win any more.

    ledger: a fresh one, which takes the trials.
    """
    for number in range(ROUNDS):
        say(f"{' and '.join(map(str, arms))} on {len(units)} prompts, round {number + 1}")
        for unit in units:
            first = not ledger.heats
            if not run_heat(trials, ledger, unit, arms, float("inf") if first else until, after):
                return
        if not can_win(ledger, arms):
            return


def judge(ledger: Ledger, finalists: Sequence[Arm]) -> Verdict:
    """The verdict by what was measured. finalists: at most one of each kind."""
    speeds = {arm: found for arm in finalists if arm not in ledger.failed and (found := ledger.speedup(arm))}
    if not speeds:
        return Verdict("off", PLAIN, "No drafter could be tried, so nothing speaks for one.")
    auto = next((arm for arm in speeds if arm.is_auto), None)
    fixed = next((arm for arm in speeds if not arm.is_auto), None)
    between = None if auto is None or fixed is None else ledger.speedup(fixed, over=auto)
    if fixed is not None and _exceeds(speeds[fixed], 1) and (between is None or _exceeds(between, FIXED_MARGIN)):
        beside = "" if between is None else f" It is faster than {auto} by more than {_MARGIN} ({between:.2f})."
        return Verdict("on", fixed, f"{fixed} is faster than plain decoding: {speeds[fixed]:.2f}.{beside}")
    if auto is not None and _exceeds(speeds[auto], 1):
        beside = "" if between is None else f" {fixed} is not faster than that by more than {_MARGIN} ({between:.2f})."
        return Verdict("on", auto, f"{auto} is faster than plain decoding: {speeds[auto]:.2f}.{beside}")
    shown = ", ".join(f"{arm} {found:.2f}" for arm, found in speeds.items())
    if all(found.high is not None and found.high < WORTH for found in speeds.values()):
        return Verdict("off", PLAIN, f"Do not speculate here: nothing that was tried is faster ({shown} of plain).")
    return Verdict(
        "tie",
        PLAIN,
        f"No difference could be shown ({shown} of plain), so plain decoding is kept. More prompts or more minutes "
        "would tell.",
    )


def _exceeds(found: Interval, bound: float) -> bool:
    return found.low is not None and found.low > bound
