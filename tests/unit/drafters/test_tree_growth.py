"""Trees grow by their best nodes, stay closed under ancestors, and stop where depth no longer pays."""

import math
import random
from typing import Any

import pytest

from forerun.drafters.growth.growing_chain import Confidence
from forerun.drafters.growth.ranked_tree import RankedTree
from forerun.drafters.growth.tree import DynamicExpansion, Expansion, ShapedExpansion


def grow(
    growth: Expansion, distribution: dict[tuple[int, ...], list[tuple[int, float]]], default: list[tuple[int, float]]
) -> int:
    """Feed a growth from a table of distributions by path; the number of depths it asked for."""
    depth = 0
    while growth.frontier:
        tree, children = growth.tree, []
        for end in growth.frontier:
            path: list[int] = []
            node = end
            while node >= 0:
                path.insert(0, tree.token_ids[node])
                node = tree.parents[node]
            children.append(distribution.get(tuple(path), default)[: growth.wanted(end)])
        growth.expand(children)
        depth += 1
    return depth


def accept_probs(
    tree: RankedTree, distribution: dict[tuple[int, ...], list[tuple[int, float]]], default: list[tuple[int, float]]
):
    found: list[float] = []
    paths: list[tuple[int, ...]] = []
    confidence = Confidence()
    for token, parent in zip(tree.token_ids, tree.parents):
        above = paths[parent] if parent >= 0 else ()
        row = distribution.get(above, default)
        rank = [each[0] for each in row].index(token)
        accept_prob = confidence.accept_prob(row[rank][1], confidence.level(row[rank][1], rank))
        found.append((found[parent] if parent >= 0 else 1.0) * accept_prob)
        paths.append((*above, token))
    return found


def random_distribution(
    rng: random.Random,
) -> tuple[dict[tuple[int, ...], list[tuple[int, float]]], list[tuple[int, float]]]:
    def row() -> list[tuple[int, float]]:
        weights = sorted((rng.random() ** 4 for _ in range(5)), reverse=True)
        return [(token, weight / sum(weights)) for token, weight in enumerate(weights)]

    distribution = {(): row()}
    for a in range(5):
        distribution[(a,)] = row()
        for b in range(5):
            distribution[(a, b)] = row()
    return distribution, row()


@pytest.mark.parametrize("seed", range(20))
def test_the_best_nodes_of_all_are_kept(seed: int) -> None:
    """Check that without limits on the search it is the best tree of all, found here by expanding everything."""
    distribution, default = random_distribution(random.Random(seed))
    growth = DynamicExpansion(9, 4, 99, 0.0, 0.0, Confidence())
    grow(growth, distribution, default)
    tree, nodes = growth.finished()
    found = accept_probs(tree, distribution, default)
    everything: list[float] = []
    complete = RankedTree()
    level = [-1]
    for _ in range(4):
        below = []
        for parent in level:
            for token in range(5):
                below.append(len(complete))
                complete.token_ids.append(token)
                complete.parents.append(parent)
        level = below
    everything = sorted(accept_probs(complete, distribution, default), reverse=True)
    assert found == pytest.approx(everything[:9])
    assert [growth.tree.token_ids[node] for node in nodes] == tree.token_ids


@pytest.mark.parametrize("seed", range(20))
def test_closed_under_ancestors_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    distribution, default = random_distribution(rng)
    growth = DynamicExpansion(rng.randint(1, 20), rng.randint(1, 5), rng.randint(1, 4), 0.02, 0.0, Confidence())
    grow(growth, distribution, default)
    tree, _ = growth.finished()
    assert all(parent < node for node, parent in enumerate(tree.parents))
    found = accept_probs(tree, distribution, default)
    assert found == sorted(found, reverse=True)
    assert len(set(zip(tree.parents, tree.token_ids))) == len(tree)


def test_certain_tokens_keep_their_ancestors() -> None:
    """Check probabilities of exactly 1, which tie with their parents'."""
    growth = DynamicExpansion(3, 9, 4, 0.0, 0.0, Confidence())
    grow(growth, {}, [(7, 1.0), (8, 0.0)])
    assert growth.finished()[0].parents == [-1, 0, 1]


def test_a_price_leaves_out_what_is_worth_less() -> None:
    row = [(0, 0.6), (1, 0.3)]
    for min_acceptance_prob in (0.05, 0.2, 0.4):
        growth = DynamicExpansion(64, 6, 8, 0.0, min_acceptance_prob, Confidence())
        grow(growth, {}, row)
        tree, _ = growth.finished()
        found = accept_probs(tree, {}, row)
        assert found and min(found) > min_acceptance_prob
        cheaper = DynamicExpansion(64, 6, 8, 0.0, min_acceptance_prob / 2, Confidence())
        grow(cheaper, {}, row)
        assert len(cheaper.finished()[0]) > len(tree)
    nothing = DynamicExpansion(64, 6, 8, 0.0, 0.99, Confidence())
    assert grow(nothing, {}, row) == 1 and len(nothing.finished()[0]) == 0


def test_it_stops_where_depth_promises_too_little() -> None:
    row = [(0, 0.6), (1, 0.2)]
    depths = [
        grow(DynamicExpansion(32, 20, 8, gain, 0.0, Confidence()), {}, row) for gain in (0.0, 0.05, 0.2, 0.5, 0.9)
    ]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > depths[2] > depths[4] == 1


def test_confidence_learns_what_probabilities_are_worth() -> None:
    confidence = Confidence()
    level = confidence.level(0.8)
    taken_at_its_word = confidence.accept_prob(0.8, level)
    assert taken_at_its_word == pytest.approx(0.8, abs=1e-6)
    for _ in range(300):
        confidence.rates.observe(level, False)
    assert confidence.accept_prob(0.8, level) < 0.05
    assert confidence.accept_prob(0.8, confidence.level(0.8, 1)) == pytest.approx(0.8, abs=1e-6)
    assert confidence.accept_prob(0.05, confidence.level(0.05)) == pytest.approx(0.05, abs=1e-6)
    assert confidence.accept_prob(1.0, confidence.level(1.0)) <= 1


def test_a_shape_is_filled_by_rank() -> None:
    shape = RankedTree([0, 1, 0, 0, 1], [-1, -1, 1, 0, 0], [0, 1, 2, 2, 3])
    growth = ShapedExpansion(shape)
    rows = {(): [(10, 1.0), (11, 1.0)], (10,): [(20, 1.0), (21, 1.0)], (11,): [(22, 1.0), (23, 1.0)]}
    assert grow(growth, rows, []) == 2
    tree, nodes = growth.finished()
    assert tree.token_ids == [10, 11, 22, 20, 21]
    assert (tree.parents, tree.levels) == (shape.parents, shape.levels)
    assert nodes == [0, 1, 4, 2, 3]  # by depth in the growing tree, by value in the draft


def test_a_shape_lacks_what_a_distribution_does_not_hold() -> None:
    growth = ShapedExpansion(RankedTree([0, 1, 0, 0], [-1, -1, 1, 0], [0, 1, 2, 2]))
    grow(growth, {(): [(10, 1.0)], (10,): [(20, 1.0)]}, [])
    tree, _ = growth.finished()
    assert (tree.token_ids, tree.parents) == ([10, 20], [-1, 0])
    assert grow(ShapedExpansion(RankedTree()), {}, []) == 0


@pytest.mark.parametrize(("num_nodes", "max_depth"), [(0, 4), (4, 0)])
def test_a_tree_that_may_have_no_nodes_asks_for_none(num_nodes: int, max_depth: int) -> None:
    growth = DynamicExpansion(num_nodes, max_depth, 4, 0.0, 0.0, Confidence())
    assert growth.frontier == []
    assert len(growth.finished()[0]) == 0


def test_children_are_left_out_only_where_none_could_be_among_the_best() -> None:
    """Check against a growth that considers every child, with measured factors above and below 1."""

    class Thorough(DynamicExpansion):
        def expand(self, children: Any) -> None:
            self._largest_factor = math.inf
            super().expand(children)

    rng = random.Random(4)
    for _ in range(60):
        confidence = Confidence()
        for _ in range(200):
            confidence.rates.observe(rng.randrange(len(confidence.rates)), rng.random() < 0.6)
        rows = {
            path: sorted(((token, rng.random() ** 3) for token in range(6)), key=lambda child: -child[1])
            for path in [(), *((a,) for a in range(6)), *((a, b) for a in range(6) for b in range(6))]
        }
        options = rng.randint(1, 12), 4, rng.randint(1, 5), 0.0, rng.choice([0.0, 0.05]), confidence
        growths = DynamicExpansion(*options), Thorough(*options)
        for growth in growths:
            grow(growth, rows, [(1, 0.5), (2, 0.2)])
        (first, _), (second, _) = (growth.finished() for growth in growths)
        assert (first.token_ids, first.parents, first.accept_probs) == (
            second.token_ids,
            second.parents,
            second.accept_probs,
        )
        assert len(growths[0].tree) <= len(growths[1].tree)
