"""Successive halving: all arms on few units, the better half of them on twice as many, and so on.

(Jamieson and Talwalkar, 1502.07943.) It selects, and nothing else: the fastest of many arms has been lucky, too, so its
speed is measured again, on units that had no part in the choice (`verdict.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forerun.tune.arms import Arm, Trials, Unit
from forerun.tune.ledger import Ledger, run_heat

FINALISTS = 2
"""Arms that are left in the end: the best of those that choose K themselves, and the best fixed one."""
LEAST_UNITS = 4
"""Units of an arm from which its interval is believed."""

More = Callable[[Ledger], Sequence[Arm]]
"""The arms that look promising by what the first ones have shown."""


def search(
    trials: Trials,
    ledger: Ledger,
    arms: Sequence[Arm],
    units: Sequence[Unit],
    until: float,
    more: More = lambda _: (),
    say: Callable[[str], None] = lambda _: None,
    after: Callable[[Arm], None] = lambda _: None,
    count: int = 1,
) -> list[Arm]:
    """The finalists, the fastest first; empty where no arm could be tried.

    Args:
        ledger: takes all trials.
        units: used in this order, and again from the first where there are too few.
        until: on the clock of the trials.
        say: is told of each round. after: of each trial.
        count: units of the first round.
    """
    left, used = list(arms), 0
    count = min(count, len(units))
    while True:
        say(f"{len(left)} arms on {count} prompt{'s' if count > 1 else ''}")
        whole = True
        for number in range(used, used + count):
            whole = run_heat(trials, ledger, units[number % len(units)], left, until, after) and whole
            if not whole:
                break
        ranked = ledger.ranked(left)
        if used == 0 and whole:
            fresh = [arm for arm in more(ledger) if arm not in left]
            for unit in units[:count] if fresh else ():
                run_heat(trials, ledger, unit, fresh, until, after)
            ranked = ledger.ranked([*left, *fresh])
        used += count
        if len(ranked) <= FINALISTS or trials.now() >= until or not can_win(ledger, ranked):
            return finalists(ranked)
        before, left = left, kept(ranked)
        if used >= len(units) and (len(left) <= FINALISTS or set(left) == set(before)):
            return finalists(ranked)
        count = min(2 * count, max(1, len(units)))


def kept(ranked: Sequence[Arm]) -> list[Arm]:
    """The better half. The finalists among them stay, and of the drafters in the first quarter the arm that chooses K
    itself, which has to learn at first."""
    half = list(ranked[: max(FINALISTS, (len(ranked) + 1) // 2)])
    good = {arm.drafter for arm in ranked[: (len(ranked) + 3) // 4]}
    learning = [arm for arm in ranked if arm.is_auto and arm.drafter in good]
    return list(dict.fromkeys([*half, *finalists(ranked), *learning]))


def finalists(ranked: Sequence[Arm]) -> list[Arm]:
    """The first arm that chooses K itself, and the first that does not, in the order in which they come."""
    first: dict[bool, Arm] = {}
    for arm in ranked:
        first.setdefault(arm.is_auto, arm)
    return list(first.values())


def can_win(ledger: Ledger, arms: Sequence[Arm]) -> bool:
    """Whether some arm may still be faster than plain decoding: its upper bound says so, or too little is known."""
    for arm in arms:
        found = ledger.speedup(arm)
        if found is None or found.high is None or len(ledger.trials(arm)) < LEAST_UNITS or found.high > 1:
            return True
    return False
