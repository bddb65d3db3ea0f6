"""The best tree of a size, against every tree of that size."""

import random
from collections.abc import Iterator

import pytest

from forerun.drafters.growth.ranked_tree import Child, RankedTree, best_tree
from forerun.speculation import Rates
from forerun.types import Verdict

Node = tuple[int, ...]
"""Ranks from the root down."""


def trees(nodes: frozenset[Node], size: int, width: int, max_depth: int) -> Iterator[frozenset[Node]]:
    """Yield every rooted tree of `size` nodes, some more than once."""
    if len(nodes) == size:
        yield nodes
        return
    for parent in ((), *nodes):
        for rank in range(width):
            child = (*parent, rank)
            if child not in nodes and len(child) <= max_depth:
                yield from trees(nodes | {child}, size, width, max_depth)


def value(node: Node, accept_probs: list[list[float]]) -> float:
    product = 1.0
    for depth, rank in enumerate(node):
        product *= accept_probs[depth][rank]
    return product


def children_of(accept_probs: list[list[float]]):
    def children(key: Node, depth: int) -> list[Child[Node]]:
        ranked = sorted(((accept_prob, rank) for rank, accept_prob in enumerate(accept_probs[depth])), reverse=True)
        return [Child(accept_prob, rank, depth * 10 + rank, (*key, rank)) for accept_prob, rank in ranked]

    return children


def nodes_of(tree: RankedTree) -> list[Node]:
    nodes: list[Node] = []
    for rank, parent in zip(tree.token_ids, tree.parents, strict=True):
        nodes.append((*(nodes[parent] if parent >= 0 else ()), rank))
    return nodes


@pytest.mark.parametrize("seed", range(4))
def test_no_tree_of_the_size_is_better(seed: int) -> None:
    rng = random.Random(seed)
    accept_probs = [[rng.random() / 2 for _ in range(3)] for _ in range(3)]
    for size in range(1, 5):
        for max_depth in (1, 2, 3):
            if max_depth == 1 and size > 3:
                continue
            tree = best_tree((), children_of(accept_probs), size, max_depth)
            every = trees(frozenset(), size, 3, max_depth)
            best = max(sum(value(node, accept_probs) for node in nodes) for nodes in every)
            nodes = nodes_of(tree)
            assert len(set(nodes)) == size and max(map(len, nodes)) <= max_depth
            assert sum(value(node, accept_probs) for node in nodes) == pytest.approx(best)
            assert tree.levels == [(len(node) - 1) * 10 + node[-1] for node in nodes]


def test_nodes_come_by_value_and_the_price_ends_them() -> None:
    rng = random.Random(0)
    accept_probs = [[rng.random() for _ in range(4)] for _ in range(4)]
    values = [value(node, accept_probs) for node in nodes_of(best_tree((), children_of(accept_probs), 60, 4))]
    assert values == sorted(values, reverse=True) and len(values) == 60
    min_acceptance_prob = values[20]
    cut = nodes_of(best_tree((), children_of(accept_probs), 60, 4, min_acceptance_prob))
    assert (
        [value(node, accept_probs) for node in cut]
        == [each for each in values if each > min_acceptance_prob]
        == values[:20]
    )


def test_nothing_fits() -> None:
    children = children_of([[0.5, 0.2]])
    assert len(best_tree((), children, 0, 3)) == len(best_tree((), children, 3, 0)) == 0
    assert best_tree((), lambda *_: [], 5, 5).token_ids == []


def test_trials_are_the_children_of_what_was_accepted() -> None:
    #        root: 5, 6    below 5: 7, 8    below 6: 9    below 8: 3
    tree = RankedTree([5, 6, 7, 8, 9, 3], [-1, -1, 0, 0, 1, 3], [0, 1, 2, 3, 4, 5])

    def trials(verdict: Verdict) -> dict[int, bool]:
        rates = Rates([0.5] * 6, weight=1)
        tree.observe(rates, verdict)
        return {level: rates.rate(level) > 0.5 for level in range(6) if rates._tried[level]}

    assert trials(Verdict([], 1)) == {0: False, 1: False}
    assert trials(Verdict([0], 1)) == {0: True, 1: False, 2: False, 3: False}
    assert trials(Verdict([0, 3], 1)) == {0: True, 1: False, 2: False, 3: True, 5: False}
    # the output ended with the accepted token 8: what would have followed it is not known
    assert trials(Verdict([0], 8)) == {0: True, 1: False, 2: False, 3: True}
    # the next token is that of the accepted node's sibling, which was not accepted for that
    assert trials(Verdict([0], 6)) == {0: True, 1: False, 2: False, 3: False}


@pytest.mark.parametrize(
    ("committed", "verdict"),
    [([5, 8, 3, 1], Verdict([0, 3, 5], 1)), ([5, 8], Verdict([0], 8)), ([6, 2, 9], Verdict([1], 2))],
)
def test_committed_tokens_say_the_same(committed: list[int], verdict: Verdict) -> None:
    tree = RankedTree([5, 6, 7, 8, 9, 3], [-1, -1, 0, 0, 1, 3], [0, 1, 2, 3, 4, 5])
    by_tokens, by_verdict = Rates([0.5] * 6), Rates([0.5] * 6)
    tree.observe_tokens(by_tokens, committed)
    tree.observe_tokens(by_tokens, [])
    tree.observe(by_verdict, verdict)
    assert [by_tokens.rate(level) for level in range(6)] == [by_verdict.rate(level) for level in range(6)]
