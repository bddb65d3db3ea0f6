"""The automatic policy in batches that do not draft for the moment: what it tries, and when."""

from __future__ import annotations

import numpy as np

from forerun.speculation import AutomaticPolicy, DraftOutcome, Prospects, StepCost
from forerun.speculation.exploration import cheapest_trial
from forerun.types import Draft, Sequence, Verdict
from worlds import GREEDY, World, best_fixed, live


def prospects(accept_prob: float, draft: float, growth: float) -> Prospects:
    """Eight sequences; a row costs 0.08 of a step. draft: seconds for all of them."""
    return Prospects(
        gains=np.full((8, 1), accept_prob),
        accept_probs=np.ones((8, 1)),
        target=1 + 0.08 * np.arange(18.0),
        draft=np.array([0.0, draft]),
        growth=growth,
    )


def test_as_many_are_tried_as_make_a_trial_cheap() -> None:
    order = [3, 1, 0, 2, 7, 6, 5, 4]
    rate = 8 / 1.64
    assert cheapest_trial(prospects(0.3, 0.0, 0.0), order, rate) == [0, 0, 0, 1, 0, 0, 0, 0]  # all trials cost the same
    assert sum(cheapest_trial(prospects(0.3, 0.8, 1.0), order, rate)) == 1
    assert sum(cheapest_trial(prospects(0.3, 0.8, 0.0), order, rate)) == 8  # one forward of the drafter
    assert sum(cheapest_trial(prospects(0.9, 0.01, 1.0), order, rate)) == 1  # even one is a gain


def test_a_poor_beginning_is_got_over_in_a_batch() -> None:
    """The drafter's forward costs as much for one as for all, so that one sequence alone would be tried but rarely."""
    world = World(
        lambda s, t, d: 0.0 if s < 8 and t < 8 else 0.85,
        lambda k, asked: 0.12 * k,
        lambda rows: 0.6 + 0.04 * rows,
        batch=8,
        length=200,
    )
    lived = live(world, AutomaticPolicy(), 400)
    assert lived.speed() >= 0.97 * best_fixed(world, 400, (0, 1, 2, 3))
    assert np.mean([any(own) for own in lived.num_draft_tokens[150:]]) > 0.9


def test_steps_with_prompts_pay_for_probes_too() -> None:
    """In a crowd nearly every step holds a prompt."""
    policy = AutomaticPolicy()
    world = World(lambda s, t, d: 0.0, lambda k, asked: 0.3 * k, lambda rows: 0.5 + 0.1 * rows, batch=8)
    live(world, policy, 100)
    sequences = [Sequence(10**6 + i, [0] * 8, 1, GREEDY, max_length=1000) for i in range(8)]
    reasons = []
    for _ in range(400):
        plan = policy.plan(sequences)
        reasons.append(plan.reason)
        outcomes = [
            DraftOutcome(each, own, Draft.chain([1] * own) if own else Draft.empty(), Verdict([], 0))
            for each, own in zip(sequences, plan.num_draft_tokens, strict=True)
        ]
        policy.observe(StepCost(40, 32, 64, 0.0, 4.5, 0.0), outcomes)
    assert "probe" in reasons[100:]
