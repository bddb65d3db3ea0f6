"""The best shape is the best: compared with the dynamic programme and with every tree there is."""

import random
from functools import cache

import pytest

from forerun.drafters.growth.tree import best_shape


def value(rates: list[list[float]], parents: list[int], ranks: list[int]) -> float:
    """Return the expected accepted tokens."""
    accept_probs: list[float] = []
    depths: list[int] = []
    for parent, rank in zip(parents, ranks):
        depth = depths[parent] + 1 if parent >= 0 else 0
        above = accept_probs[parent] if parent >= 0 else 1.0
        depths.append(depth)
        accept_probs.append(above * rates[min(depth, len(rates) - 1)][rank])
    return sum(accept_probs)


def best_value(rates: list[list[float]], num_nodes: int, max_depth: int) -> float:
    """Compute Sequoia's dynamic programme: share the nodes out among children, rank by rank."""

    @cache
    def below(nodes: int, depth: int, rank: int) -> float:
        """Return the most that `nodes` nodes can give as children from this rank on, with all that is below them."""
        row = rates[min(depth, len(rates) - 1)]
        if not nodes or depth == max_depth or rank == len(row):
            return 0.0
        options = [below(nodes, depth, rank + 1)]
        for taken in range(1, nodes + 1):
            with_child = row[rank] * (1 + below(taken - 1, depth + 1, 0))
            options.append(with_child + below(nodes - taken, depth, rank + 1))
        return max(options)

    return below(num_nodes, 0, 0)


@pytest.mark.parametrize("seed", range(60))
def test_no_tree_is_better(seed: int) -> None:
    rng = random.Random(seed)
    rates = [sorted((rng.random() for _ in range(4)), reverse=True) for _ in range(rng.randint(1, 4))]
    num_nodes, max_depth = rng.randint(1, 12), rng.randint(1, 6)
    shape = best_shape(rates, num_nodes, max_depth)
    assert value(rates, shape.parents, shape.token_ids) == pytest.approx(best_value(rates, num_nodes, max_depth))
    assert len(shape) <= num_nodes
    assert len(set(zip(shape.parents, shape.token_ids))) == len(shape)


def test_any_first_part_is_the_best_of_its_size() -> None:
    rates = [[0.6, 0.3, 0.1], [0.5, 0.2, 0.1]]
    shape = best_shape(rates, 12, 5)
    for size in range(1, 13):
        assert value(rates, shape.parents[:size], shape.token_ids[:size]) == pytest.approx(best_value(rates, size, 5))


def test_parents_and_earlier_ranks_come_first() -> None:
    shape = best_shape([[0.5, 0.5, 0.5]], 20, 4)  # ties everywhere
    for node, (parent, rank) in enumerate(zip(shape.parents, shape.token_ids)):
        assert parent < node
        siblings = [shape.token_ids[i] for i in range(node) if shape.parents[i] == parent]
        assert siblings == list(range(rank))


def test_a_rank_measured_above_the_one_before_it_is_no_better() -> None:
    shape = best_shape([[0.2, 0.9]], 2, 1)
    assert shape.token_ids == [0, 1]
    shape = best_shape([[0.5, 0.1, 0.4]], 3, 3)
    assert shape.parents == [-1, 0, 1]


def test_price_and_depth_bound_it() -> None:
    rates = [[0.6, 0.25], [0.5, 0.2]]
    assert best_shape(rates, 30, 2).parents == [-1, 0, -1, 2, 0, 2]
    assert best_shape(rates, 30, 9, min_acceptance_prob=0.2).parents == [-1, 0, -1]
    assert len(best_shape(rates, 30, 0)) == len(best_shape(rates, 0, 9)) == 0


def test_levels_tell_depth_and_rank_apart() -> None:
    shape = best_shape([[0.6, 0.3], [0.5, 0.2]], 6, 3)
    depths = {-1: -1}
    for node, (parent, rank, level) in enumerate(zip(shape.parents, shape.token_ids, shape.levels)):
        depths[node] = depths[parent] + 1
        assert level == min(depths[node], 1) * 2 + rank
