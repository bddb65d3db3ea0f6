"""From one look at each drafter to the arms that may be the fastest: K by the predictor, hybrids of the best ones."""

from __future__ import annotations

from forerun.plan.predictor import Prediction, StepCosts
from forerun.plan.step_times import CostCurve
from forerun.tune.arms import PLAIN, Arm, Trial
from forerun.tune.candidates import hybrids, is_tree, quantised_drafts
from forerun.tune.ledger import Ledger

MOST = 16
"""Largest K of a chain that is predicted."""
TREE_NODES = (8, 32)
"""K of trees beside the first look: acceptance by depth does not tell that of trees of another size."""
BEST = 3
"""Drafters for which further arms are made."""


def promising(target: CostCurve, ledger: Ledger) -> list[Arm]:
    """Further arms by what the first trials have shown.

    Args:
        target: seconds of a forward, by rows.
        ledger: of the first trials.
    """
    ranked = ledger.ranked([arm for heat in ledger.heats for arm in heat.trials])
    best = list(dict.fromkeys(arm.drafter for arm in ranked))
    arms: list[Arm] = []
    for text in best[:BEST]:
        arms += [Arm(text, k) for k in (TREE_NODES if is_tree(text) else _counts(text, target, ledger))]
    mixed = [*hybrids(best), *quantised_drafts(best[:BEST])]
    arms += [Arm(text) for text in mixed]
    return list(dict.fromkeys(arms))


def _counts(text: str, target: CostCurve, ledger: Ledger) -> list[int]:
    """The K that is predicted to be the fastest for a chain, and those beside it."""
    looked = [arm for heat in ledger.heats for arm in heat.trials if arm.drafter == text and not arm.is_auto]
    plain = ledger.trials(PLAIN)
    if not looked or not plain:
        return []
    found = predicted(ledger.trials(looked[0])[0], plain[0], target)
    fastest = max(found.by_k, key=lambda each: each.speedup, default=None)
    if fastest is None:
        return []
    k = fastest.num_draft_tokens
    return sorted({max(1, k // 2), k, min(MOST, k + max(1, k // 2))})


def predicted(trial: Trial, plain: Trial, target: CostCurve) -> Prediction:
    """What every K up to MOST would give, by one trial at a fixed K.

    The drafter's seconds grow with what it drafts; the engine's part stays.
    """
    forwards = max(1, trial.num_forwards)
    nodes = trial.num_drafted / forwards
    each = trial.draft_seconds / max(1, trial.num_drafted)
    rest = max(0.0, trial.seconds - trial.draft_seconds - trial.target_seconds) / forwards
    counts = range(MOST + 1)
    costs = StepCosts(
        plain.per_token,
        [target(count + 1) for count in counts],
        [each * count for count in counts],
        [rest for _ in counts],
    )
    gains, chances = _by_position(trial, forwards)
    return Prediction.of(costs, gains, chances if nodes else [])


def _by_position(trial: Trial, forwards: int) -> tuple[list[float], list[float]]:
    """The chance of each position that a token is there and accepted, and that one is there; beyond the positions that
    were seen, as the last of them goes on."""
    accepted = [count / forwards for count in trial.accepted]
    there = [count / forwards for count in trial.reached]
    keep = accepted[-1] / accepted[-2] if len(accepted) > 1 and accepted[-2] else sum(accepted[:1])
    drafted = min(1.0, trial.num_drafted / forwards / max(1, len(there)))
    while len(accepted) < MOST:
        accepted.append(accepted[-1] * keep if accepted else 0.0)
    return accepted[:MOST], [drafted] * MOST
