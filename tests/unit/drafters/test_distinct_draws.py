"""Draws without replacement follow their distribution, order included."""

from itertools import permutations

import pytest
import torch
from scipy.stats import chi2

from forerun.drafters.growth.tree import draw_distinct


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("distribution", [[0.5, 0.3, 0.15, 0.05], [0.97, 0.01, 0.01, 0.01]])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_ordered_draws_follow_the_distribution(distribution: list[float], count: int) -> None:
    num = 20_000
    drawn = draw_distinct(torch.tensor(distribution).expand(num, -1), [count] * num, generator())
    counts: dict[tuple[int, ...], int] = {}
    for tokens in drawn:
        counts[tuple(tokens)] = counts.get(tuple(tokens), 0) + 1
    statistic, freedom, rare_seen, rare_expected = 0.0, -1, 0.0, 0.0
    for order in permutations(range(4), count):
        expected, left = float(num), 1.0
        for token in order:
            expected *= distribution[token] / left
            left -= distribution[token]
        if expected < 5:
            rare_seen, rare_expected = rare_seen + counts.pop(order, 0), rare_expected + expected
            continue
        statistic += (counts.pop(order, 0) - expected) ** 2 / expected
        freedom += 1
    if rare_expected:
        statistic += (rare_seen - rare_expected) ** 2 / rare_expected
        freedom += 1
    assert not counts
    assert chi2.sf(statistic, freedom) > 1e-3


def test_rows_take_what_they_want_and_no_more_than_there_is() -> None:
    probs = torch.tensor([[0.2, 0.3, 0.5, 0.0], [0.0, 1.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25], [0, 0, 0, 0]])
    drawn = draw_distinct(probs, [4, 3, 2, 2], generator())
    assert sorted(drawn[0]) == [0, 1, 2]
    assert drawn[1] == [1]
    assert len(set(drawn[2])) == 2
    assert drawn[3] == []


def test_the_least_probable_are_found_beside_a_giant() -> None:
    distribution = torch.tensor([[1.0, 1e-12, 1e-13, 0.0]])
    assert draw_distinct(distribution, [3], generator())[0][0] == 0
    assert sorted(draw_distinct(distribution, [3], generator())[0]) == [0, 1, 2]


def test_distribution_are_left_as_they_were() -> None:
    probs = torch.tensor([[0.9, 0.1]])
    draw_distinct(probs, [2], generator())
    assert torch.equal(probs, torch.tensor([[0.9, 0.1]]))
