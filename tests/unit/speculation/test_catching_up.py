"""Drafters that must first compute with what stands before: their first draft's cost says little of the next ones'."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.speculation import AutomaticPolicy, CostModel, DraftOutcome, FixedPolicy, StepCost
from forerun.speculation.exploration import Pauses
from forerun.types import Draft, Sequence, Verdict
from worlds import GREEDY, World, best_fixed, live

PAYING = World(lambda s, t, d: 0.8, lambda k, asked: 0.1 * k, lambda rows: 1 + 0.02 * rows, prompt=200, catch_up=0.01)
"""Catching up with a prompt costs two plain steps, a draft of four tokens 0.4."""


@pytest.mark.parametrize("batch", [1, 4])
def test_a_costly_first_draft_does_not_end_drafting(batch: int) -> None:
    world = World(**{**PAYING.__dict__, "batch": batch})
    lived = live(world, AutomaticPolicy(), 600)
    assert lived.speed() >= 0.95 * best_fixed(world, 600)
    assert np.mean([any(own) for own in lived.num_draft_tokens[100:]]) > 0.9


def test_a_wrong_first_impression_is_corrected() -> None:
    """The second step of a probe shows a drafter as it is that two slow drafts have made look slow."""
    policy = AutomaticPolicy()
    for _ in range(2):
        policy.costs.add_draft(1, 1, 2.0)
    lived = live(PAYING, policy, 3000)
    drafts = [own[0] > 0 for own in lived.num_draft_tokens]
    assert not any(drafts[:8])
    assert np.mean(drafts[1500:]) > 0.9


def test_drafting_does_not_begin_where_the_rest_is_too_short_for_it() -> None:
    """Of prompts of 4,000 tokens and answers of 20."""
    world = World(**{**PAYING.__dict__, "prompt": 4000, "length": 20})
    plain = live(world, FixedPolicy(0), 3000).speed()
    assert live(world, FixedPolicy(4), 3000).speed() < 0.7 * plain
    lived = live(world, AutomaticPolicy(), 3000)
    assert lived.speed(300) >= 0.97 * plain


def test_what_a_first_draft_costs_beyond_the_usual_is_that_of_its_tokens() -> None:
    costs = CostModel()
    assert costs.catch_up(100) == 0
    costs.add_first_draft(1, 2, 100, 1.2)  # nothing is known: the most of it is taken to be for the tokens
    assert 0.1 < costs.draft(1, 2)[2] < 0.3
    for _ in range(8):
        costs.add_draft(1, 2, 0.2)
    assert costs.draft(1, 2)[2] == pytest.approx(0.2, rel=0.05)
    costs.add_first_draft(1, 2, 100, 1.2)
    assert costs.catch_up(50) == pytest.approx(0.5, rel=0.05)
    assert costs.draft(1, 2)[2] == pytest.approx(0.2, rel=0.05)
    costs.add_first_draft(1, 2, 10, 0.05)  # less than usual, whatever was computed besides
    assert costs.draft(1, 2)[2] < 0.2
    assert CostModel.restored(costs.state()).catch_up(50) == pytest.approx(costs.catch_up(50))
    assert CostModel.restored({**costs.state(), "target": [], "draft": []}).catch_up(50) > 0
    with pytest.raises(ValueError, match="outside"):
        CostModel.restored({**costs.state(), "catch_up": [-1.0, 1.0]})


def test_following_a_prompt_is_a_cost_of_drafting_where_it_might_have_been_put_off() -> None:
    for catches_up in (True, False):
        policy, own = AutomaticPolicy(catches_up=catches_up), Sequence(0, [0] * 101, 100, GREEDY, max_length=400)
        prompt = StepCost(num_rows=50, num_prompt_rows=50, context=0, time_draft=0.5, time_target=1.0, time_verify=0.0)
        for _ in range(2):
            policy.observe(prompt, [])
        for _ in range(8):  # plain ones, in which the drafter is told what happened
            plan = policy.plan([own])
            cost = StepCost(1, 0, len(own.token_ids), 0.0, 1.0, 0.0)
            policy.observe(cost, [DraftOutcome(own, plan.num_draft_tokens[0], Draft.empty(), Verdict([], 0))])
            own.token_ids.append(0)
        assert policy.costs.catch_up(202) == pytest.approx(2.0 if catches_up else 0.0, rel=0.1)


def test_what_prompts_take_in_the_drafter_is_kept_with_the_other_costs() -> None:
    costs = CostModel()
    costs.add_idle(0.1)
    costs.add_following(0.6, 100)
    assert costs.catch_up(50) == pytest.approx(0.25)
    assert CostModel.restored(costs.state()).catch_up(50) == pytest.approx(0.25)


def test_after_a_followed_prompt_a_first_draft_costs_what_drafts_cost() -> None:
    costs = CostModel()
    costs.add_following(2.0, 200)
    costs.add_first_draft(4, 2, 200, 1.2)
    assert costs.draft(4, 2)[2] == pytest.approx(1.2)
    costs.add_first_draft(2, 2, 200, 5.0)  # of another batch: no less than is known of that one, shrunk
    assert costs.draft(2, 2)[2] == pytest.approx(5.0)
    before = costs.draft(4, 2)[2]
    costs.add_first_draft(4, 2, 200, 1.1)  # a little less is no sign
    assert costs.draft(4, 2)[2] == before


def test_what_is_known_of_other_batches_bounds_what_a_first_draft_may_cost_without_catching_up() -> None:
    costs = CostModel()
    for _ in range(8):
        costs.add_draft(1, 2, 1.0)
    costs.add_first_draft(4, 2, 200, 3.0)
    assert costs.draft(4, 2)[2] == pytest.approx(2.0)  # as the root of the number of sequences, not 3 / 11
    assert costs.catch_up(100) == 0


def test_pauses() -> None:
    pauses, sequence = Pauses(), Sequence(0, [0] * 30, 30, GREEDY, max_length=100)
    pauses.come(sequence, 4)
    pauses.come(sequence, 5)
    assert pauses.tokens_that_came() == 30 and pauses.tokens_that_came() == 0
    assert pauses.lag(sequence, 5) == 30 and not pauses.has_paused(sequence, 5)
    assert pauses.has_paused(sequence, 6)
    pauses.drafted(sequence, 6)
    assert pauses.last(sequence) == 6 and pauses.lag(sequence, 7) == 0
    sequence.token_ids += [0] * 5
    assert pauses.lag(sequence, 9) == 5
    pauses.stop(sequence)
    assert len(pauses) == 0 and pauses.lag(sequence, 10) == 35
