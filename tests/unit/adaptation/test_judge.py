"""A copy is better only beyond chance, in all looks together."""

from __future__ import annotations

import torch

from forerun.adaptation.pupil import BLOCK, CHANCE, LEAST_BLOCKS, gain

GENERATOR = torch.Generator().manual_seed(0)


def accepted(rate: float, blocks: int = 64) -> torch.Tensor:
    """Accepted tokens of drafts of three, each of which is right with this probability."""
    right = torch.rand(3, blocks * BLOCK, generator=GENERATOR) < rate
    return right.long().cumprod(0).sum(0)


def test_the_better_one_is_found_from_either_side_and_late() -> None:
    good, bad = accepted(0.7), accepted(0.5)
    assert gain(good, bad).is_beyond_chance(1)
    assert gain(good, bad).is_beyond_chance(1000)
    assert not gain(bad, good).is_beyond_chance(1)


def test_chance_is_that_of_a_t_distribution() -> None:
    for t, chance in ((1.895, 0.05), (2.998, 0.01), (4.785, 0.001)):  # of seven degrees of freedom, from tables
        blocks = torch.zeros(LEAST_BLOCKS, BLOCK)
        blocks[0::2] = 1  # neighbours differ
        blocks = blocks - 0.5
        found = gain((blocks + t * 0.5 / (LEAST_BLOCKS - 1) ** 0.5).reshape(-1), torch.zeros(LEAST_BLOCKS * BLOCK))
        assert abs(found.mean / found.error - t) < 1e-3
        assert abs(found.chance / chance - 1) < 0.05


def test_equal_ones_are_not_beyond_chance_however_often_one_looks() -> None:
    same = accepted(0.6)
    assert gain(same, same).chance == 1
    ever = 0
    for _ in range(200):
        looks = [gain(accepted(0.6, LEAST_BLOCKS), accepted(0.6, LEAST_BLOCKS)) for _ in range(20)]
        ever += any(each.is_beyond_chance(look) for look, each in enumerate(looks, 1))
    assert ever <= 1.5 * CHANCE * 200


def test_what_neighbours_have_in_common_counts_once() -> None:
    ours, theirs = accepted(0.65, 32), accepted(0.6, 32)
    alone = gain(ours, theirs)
    twice = gain(*(each.view(32, BLOCK).repeat_interleave(2, 0).reshape(-1) for each in (ours, theirs)))
    assert abs(twice.mean - alone.mean) < 1e-9
    assert twice.error > 0.85 * alone.error  # 0.7 if they were others


def test_few_positions_decide_nothing() -> None:
    ones, none = torch.ones(BLOCK * LEAST_BLOCKS - 1), torch.zeros(BLOCK * LEAST_BLOCKS - 1)
    assert not gain(ones, none).is_beyond_chance(1)
    assert not gain(ones[:0], none[:0]).is_beyond_chance(1)
