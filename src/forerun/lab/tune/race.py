"""The race of `forerun try`: a few arms on the same prompts, until it is certain which of them is the fastest.

While it runs it is looked at after every prompt, so that intervals of 99 % decide; in the end those of 95 % do, as
clinical trials are looked at (Peto and others, Br J Cancer 34, 1976). No second half of prompts confirms the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from forerun.lab.tune.arms import PLAIN, Trials, TuningArm, Unit
from forerun.lab.tune.ledger import Ledger, exceeds, run_round, stays_below
from forerun.lab.tune.outcome import ROUNDS, WORTH, TuningVerdict, judge
from forerun.lab.tune.search import LEAST_UNITS

INTERIM = 0.99
"""Confidence of the intervals while it runs."""
CLOSE = 1.05
"""Where nothing is faster than the best by more than this, it is not asked for longer which is the fastest."""


def race(
    trials: Trials,
    ledger: Ledger,
    arms: Sequence[TuningArm],
    units: Sequence[Unit],
    until: float,
    say: Callable[[str], None] = lambda _: None,
    after: Callable[[TuningArm], None] = lambda _: None,
) -> None:
    """Try the arms on the units in turn. Those that are certainly not the fastest are left, and it ends when one is
    certainly faster than plain decoding and hardly slower than any other, when certainly none gains, or at `until`.

    ledger: a fresh one, which takes the trials. until: on the clock of the trials.
    """
    left = list(arms)
    for number, unit in enumerate([*units] * ROUNDS, 1):
        say(f"measuring; drafters: {len(left)}, prompt: {number}")
        whole = run_round(trials, ledger, unit, left, until if ledger.rounds else float("inf"), after)
        left = contenders(replace(ledger, confidence=INTERIM), left)
        if not whole or not left:
            return


def contenders(ledger: Ledger, arms: Sequence[TuningArm]) -> list[TuningArm]:
    """Return the arms that are to be measured further, the fastest first; none where nothing is open any more."""
    ranked = ledger.ranked(arms)
    if len(ledger.rounds) < LEAST_UNITS:
        return ranked
    gaining = [arm for arm in ranked if (found := ledger.speedup(arm)) is not None and not stays_below(found, WORTH)]
    if not gaining:
        return []
    best, *others = gaining
    over_best = {arm: found for arm in others if (found := ledger.speedup(arm, over=best)) is not None}
    rivals = [arm for arm, found in over_best.items() if not stays_below(found, 1)]
    speed = ledger.speedup(best)
    is_open = speed is None or not exceeds(speed, 1) or not all(stays_below(over_best[arm], CLOSE) for arm in rivals)
    return [best, *rivals] if is_open else []


def judge_race(ledger: Ledger, arms: Sequence[TuningArm], default: TuningArm) -> TuningVerdict:
    """Return the verdict: the fastest of the arms that are shown to be faster than plain decoding, else the default.

    arms: the fastest first. default: of `judge`.
    """
    verdict = judge(ledger, arms, PLAIN)
    return judge(ledger, arms, default) if verdict.answer == "tie" else verdict
