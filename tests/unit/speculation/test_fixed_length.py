"""Whole drafts or none: whichever gives more tokens per second."""

from __future__ import annotations

import pytest
import torch

from forerun import SamplingParams
from forerun.speculation import DraftOutcome, FixedLengthPolicy, StepCost
from forerun.speculation.fixed_length import WHOLE_STEPS
from forerun.types import Draft, Sequence, Verdict

NODES = 15


def live(
    gain: float, cost: float, steps: int = 4000, batch: int = 1, policy: FixedLengthPolicy | None = None
) -> list[bool]:
    """Steps in a world where a drafted step gives `gain` tokens and takes `cost`, a plain one 1 and 1."""
    policy = policy or FixedLengthPolicy(NODES)
    sequences = [Sequence(i, [1, 2], 2, SamplingParams(), max_length=2**40) for i in range(batch)]
    draft = Draft(torch.zeros(NODES, dtype=torch.int64), torch.arange(-1, NODES - 1))
    drafted, owed = [], 0.0
    for _ in range(steps):
        plan = policy.plan(sequences)
        asked = plan.num_draft_tokens[0] > 0
        assert plan.num_draft_tokens == [NODES if asked else 0] * batch
        owed += gain - 1 if asked else 0
        accepted, owed = int(owed), owed - int(owed)
        outcomes = [
            DraftOutcome(each, NODES, draft, Verdict(list(range(accepted)), 0))
            if asked
            else DraftOutcome(each, 0, Draft.empty(), Verdict([], 0))
            for each in sequences
        ]
        seconds = cost if asked else 1.0
        policy.observe(StepCost(batch, 0, 100, 0.0, seconds, 0.0), outcomes)
        drafted.append(asked)
    return drafted


@pytest.mark.parametrize(("gain", "cost"), [(2.0, 1.3), (1.2, 1.1), (3.0, 2.9)])
def test_what_pays_is_kept(gain: float, cost: float) -> None:
    assert sum(live(gain, cost)) > 0.95 * 4000


@pytest.mark.parametrize(("gain", "cost"), [(1.0, 1.5), (1.4, 1.6), (1.0, 3.0)])
def test_what_does_not_pay_is_tried_ever_more_rarely(gain: float, cost: float) -> None:
    drafted = live(gain, cost)
    taken = sum(cost if each else 1.0 for each in drafted)
    given = sum(gain if each else 1.0 for each in drafted)
    assert given / taken > 0.97
    assert 0 < sum(drafted[2000:]) <= 3 * WHOLE_STEPS  # it is, now and then


def test_loads_are_told_apart_and_a_change_is_noticed() -> None:
    policy = FixedLengthPolicy(NODES)
    assert sum(live(2.0, 1.2, 500, 1, policy)) > 400
    assert sum(live(1.5, 4.0, 500, 16, policy)) < 100
    assert sum(live(2.0, 1.2, 500, 1, policy)) > 450
    assert sum(live(1.0, 2.0, 1000, 1, policy)) < 300


def test_prompts_say_nothing() -> None:
    policy = FixedLengthPolicy(NODES)
    policy.observe(StepCost(40, 39, 100, 0.0, 99.0, 0.0), [])
    assert sum(live(2.0, 1.2, 500, 1, policy)) > 400


def test_a_trial_of_whole_drafts_ends_when_it_has_lost_enough() -> None:
    drafted = live(1.0, 20.0, 150)
    assert sum(drafted) == 1
    policy = FixedLengthPolicy(NODES)
    live(1.0, 1.6, 100, 1, policy)
    assert sum(live(1.0, 5.0, 100, 32, policy)) == 0  # what lost in a small batch is not tried at once
