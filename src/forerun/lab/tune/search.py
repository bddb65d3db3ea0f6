"""Successive halving: all arms on few units, the better half of them on twice as many, and so on.

(Jamieson and Talwalkar, 1502.07943.) It only selects: the maximum of many noisy speeds is biased upwards, so the
speed of the finalists is measured again, on units that had no part in the choice (`outcome.confirm`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forerun.lab.tune.arms import Trials, TuningArm, Unit
from forerun.lab.tune.ledger import Ledger, run_round

FINALISTS = 2
"""Arms that are left in the end: the best of those that choose K themselves, and the best fixed one."""
LEAST_UNITS = 4
"""Units of an arm from which its interval is believed."""

More = Callable[[Sequence[TuningArm]], Sequence[TuningArm]]
"""Returns the arms that the first trials suggest, of those that were tried, the fastest first."""


def search(
    trials: Trials,
    ledger: Ledger,
    arms: Sequence[TuningArm],
    units: Sequence[Unit],
    until: float,
    more: More = lambda _: (),
    say: Callable[[str], None] = lambda _: None,
    after: Callable[[TuningArm], None] = lambda _: None,
    count: int = 1,
) -> list[TuningArm]:
    """Find the finalists, the fastest first; empty where no arm could be tried.

    Args:
        ledger: takes all trials.
        units: used in this order, and again from the first where there are too few.
        until: on the clock of the trials.
        say: called with a line for each round.
        after: called after each trial.
        count: units of the first round.
    """
    left = list(arms)
    used = 0
    count = min(count, len(units))
    while True:
        say(f"choosing; drafters: {len(left)}, prompts: {count}")
        whole = True
        for number in range(used, used + count):
            whole = run_round(trials, ledger, units[number % len(units)], left, until, after) and whole
            if not whole:
                break
        ranked = ledger.ranked(left)
        if used == 0 and whole:
            fresh = [arm for arm in more(ranked) if arm not in left]
            for unit in units[:count] if fresh else ():
                run_round(trials, ledger, unit, fresh, until, after)
            ranked = ledger.ranked([*left, *fresh])
        used += count
        if len(ranked) <= FINALISTS or trials.now() >= until or not can_win(ledger, ranked):
            return finalists(ranked)
        before = left
        left = kept_arms(ranked)
        if used >= len(units) and (len(left) <= FINALISTS or set(left) == set(before)):
            return finalists(ranked)
        count = min(2 * count, max(1, len(units)))


def kept_arms(ranked: Sequence[TuningArm]) -> list[TuningArm]:
    """Return the better half, the finalists, and of the drafters in the first quarter the arm that chooses K itself,
    which has to learn at first."""
    half = list(ranked[: max(FINALISTS, (len(ranked) + 1) // 2)])
    good = {arm.drafter for arm in ranked[: (len(ranked) + 3) // 4]}
    learning = [arm for arm in ranked if arm.is_auto and arm.drafter in good]
    return list(dict.fromkeys([*half, *finalists(ranked), *learning]))


def finalists(ranked: Sequence[TuningArm]) -> list[TuningArm]:
    """Return the first arm that chooses K itself, and the first that does not, in the order given; the first two where
    there are none of one kind."""
    first: dict[bool, TuningArm] = {}
    for arm in ranked:
        first.setdefault(arm.is_auto, arm)
    return list(first.values()) if len(first) > 1 else list(ranked[:FINALISTS])


def can_win(ledger: Ledger, arms: Sequence[TuningArm]) -> bool:
    """Return whether some arm may still be faster than plain decoding: its upper bound exceeds 1, or there are too few
    trials."""
    for arm in arms:
        found = ledger.speedup(arm)
        if found is None or found.high is None or len(ledger.trials(arm)) < LEAST_UNITS or found.high > 1:
            return True
    return False
