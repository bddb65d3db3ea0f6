"""A copy is better only beyond chance."""

from __future__ import annotations

import torch

from forerun.adaptation.judge import BLOCK, ENTERS, LEAST_BLOCKS, LEAVES, gain

GENERATOR = torch.Generator().manual_seed(0)


def accepted(rate: float, blocks: int = 64) -> torch.Tensor:
    """Accepted tokens of drafts of three, each of which is right with this probability."""
    right = torch.rand(3, blocks * BLOCK, generator=GENERATOR) < rate
    return right.long().cumprod(0).sum(0)


def test_the_better_one_is_found_from_either_side() -> None:
    good, bad = accepted(0.7), accepted(0.5)
    assert gain(good, bad).exceeds(ENTERS)
    assert not gain(bad, good).exceeds(0)


def test_equal_ones_are_not_beyond_chance() -> None:
    same = accepted(0.6)
    assert not gain(same, same).exceeds(LEAVES)
    entered = sum(gain(accepted(0.6, LEAST_BLOCKS), accepted(0.6, LEAST_BLOCKS)).exceeds(ENTERS) for _ in range(500))
    assert entered <= 15  # one-sided t of seven degrees of freedom: 1 %


def test_few_positions_decide_nothing() -> None:
    ones, none = torch.ones(BLOCK * LEAST_BLOCKS - 1), torch.zeros(BLOCK * LEAST_BLOCKS - 1)
    assert not gain(ones, none).exceeds(LEAVES)
    assert not gain(ones[:0], none[:0]).exceeds(LEAVES)
