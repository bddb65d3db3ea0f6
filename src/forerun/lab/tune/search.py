"""Successive halving: all arms on few units, the better half of them on twice as many, and so on.

(Jamieson and Talwalkar, 1502.07943.) It only selects: the maximum of many noisy speeds is biased upwards, so the
speed of the finalists is measured again, on units that had no part in the choice (`outcome.confirm`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forerun.engine.step_times import CostCurve
from forerun.lab.tune.arms import PLAIN, Trial, Trials, TuningArm, Unit
from forerun.lab.tune.candidates import hybrids, is_tree
from forerun.lab.tune.ledger import Ledger, run_round
from forerun.speculation.predictor import SpeedPrediction, StepCosts

FINALISTS = 2
"""Arms that are left in the end: the best of those that choose K themselves, and the best fixed one."""
LEAST_UNITS = 4
"""Units of an arm from which its interval is believed."""

More = Callable[[Ledger], Sequence[TuningArm]]
"""Returns the arms that the first trials suggest."""


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
    left, used = list(arms), 0
    count = min(count, len(units))
    while True:
        say(f"{len(left)} arms on {count} prompt{'s' if count > 1 else ''}")
        whole = True
        for number in range(used, used + count):
            whole = run_round(trials, ledger, units[number % len(units)], left, until, after) and whole
            if not whole:
                break
        ranked = ledger.ranked(left)
        if used == 0 and whole:
            fresh = [arm for arm in more(ledger) if arm not in left]
            for unit in units[:count] if fresh else ():
                run_round(trials, ledger, unit, fresh, until, after)
            ranked = ledger.ranked([*left, *fresh])
        used += count
        if len(ranked) <= FINALISTS or trials.now() >= until or not can_win(ledger, ranked):
            return finalists(ranked)
        before, left = left, kept(ranked)
        if used >= len(units) and (len(left) <= FINALISTS or set(left) == set(before)):
            return finalists(ranked)
        count = min(2 * count, max(1, len(units)))


def kept(ranked: Sequence[TuningArm]) -> list[TuningArm]:
    """Return the better half, the finalists, and of the drafters in the first quarter the arm that chooses K itself,
    which has to learn at first."""
    half = list(ranked[: max(FINALISTS, (len(ranked) + 1) // 2)])
    good = {arm.drafter for arm in ranked[: (len(ranked) + 3) // 4]}
    learning = [arm for arm in ranked if arm.is_auto and arm.drafter in good]
    return list(dict.fromkeys([*half, *finalists(ranked), *learning]))


def finalists(ranked: Sequence[TuningArm]) -> list[TuningArm]:
    """Return the first arm that chooses K itself, and the first that does not, in the order given."""
    first: dict[bool, TuningArm] = {}
    for arm in ranked:
        first.setdefault(arm.is_auto, arm)
    return list(first.values())


def can_win(ledger: Ledger, arms: Sequence[TuningArm]) -> bool:
    """Return whether some arm may still be faster than plain decoding: its upper bound exceeds 1, or there are too few
    trials."""
    for arm in arms:
        found = ledger.speedup(arm)
        if found is None or found.high is None or len(ledger.trials(arm)) < LEAST_UNITS or found.high > 1:
            return True
    return False


MOST = 16
"""Largest K of a chain that is predicted."""
TREE_NODES = (8, 32)
"""K of trees beside the first trial: acceptance by depth does not predict that of trees of another size."""
BEST = 3
"""Drafters for which further arms are made."""


def promising(target: CostCurve, ledger: Ledger) -> list[TuningArm]:
    """Return further arms that the first trials suggest.

    Args:
        target: seconds of a forward, by rows.
        ledger: of the first trials.
    """
    ranked = ledger.ranked([arm for round_ in ledger.rounds for arm in round_.trials])
    best = list(dict.fromkeys(arm.drafter for arm in ranked))
    arms: list[TuningArm] = []
    for text in best[:BEST]:
        arms += [TuningArm(text, k) for k in (TREE_NODES if is_tree(text) else _counts(text, target, ledger))]
    quantized = [f"{text}:quantize=int8" for text in best[:BEST] if text == "draft-model"]  # changes no bit of the text
    arms += [TuningArm(text) for text in [*hybrids(best), *quantized]]
    return list(dict.fromkeys(arms))


def _counts(text: str, target: CostCurve, ledger: Ledger) -> list[int]:
    """Return the K that is predicted to be the fastest for a chain, and those beside it."""
    looked = [arm for round_ in ledger.rounds for arm in round_.trials if arm.drafter == text and not arm.is_auto]
    plain = ledger.trials(PLAIN)
    if not looked or not plain:
        return []
    found = predicted(ledger.trials(looked[0])[0], plain[0], target)
    fastest = max(found.by_k, key=lambda each: each.speedup, default=None)
    if fastest is None:
        return []
    k = fastest.num_draft_tokens
    return sorted({max(1, k // 2), k, min(MOST, k + max(1, k // 2))})


def predicted(trial: Trial, plain: Trial, target: CostCurve) -> SpeedPrediction:
    """Predict the speed of every K up to MOST from one trial at a fixed K.

    The drafter's seconds grow with what it drafts; the engine's part stays.
    """
    forwards = max(1, trial.num_forwards)
    nodes = trial.num_drafted / forwards
    each = trial.draft_seconds / max(1, trial.num_drafted)
    engine = max(0.0, trial.seconds - trial.draft_seconds - trial.target_seconds) / forwards
    counts = range(MOST + 1)
    costs = StepCosts(
        plain.per_token,
        [target(count + 1) for count in counts],
        [each * count for count in counts],
        [engine for _ in counts],
    )
    gains, accept_probs = _by_position(trial, forwards)
    return SpeedPrediction.of(costs, gains, accept_probs if nodes else [])


def _by_position(trial: Trial, forwards: int) -> tuple[list[float], list[float]]:
    """Return by position the probability that a token is there and accepted, and that one is there; beyond the
    positions that were reached, extrapolated from the last."""
    accepted = [count / forwards for count in trial.accepted]
    there = [count / forwards for count in trial.reached]
    keep = accepted[-1] / accepted[-2] if len(accepted) > 1 and accepted[-2] else sum(accepted[:1])
    drafted = min(1.0, trial.num_drafted / forwards / max(1, len(there)))
    while len(accepted) < MOST:
        accepted.append(accepted[-1] * keep if accepted else 0.0)
    return accepted[:MOST], [drafted] * MOST
