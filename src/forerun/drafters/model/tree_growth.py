"""Draft trees while they grow, one depth at a time; plain lists, no model."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import Protocol

from forerun.drafters.model.confidence import Confidence
from forerun.drafters.ranked_tree import Child, RankedTree, best_tree
from forerun.tree import ROOT


class Growth(Protocol):
    """One tree while it grows.

    Attributes:
        tree: nodes so far, parents first.
        frontier: nodes whose children come next, all of one depth; -1 is the last committed token. Empty at the end.
    """

    tree: RankedTree
    frontier: list[int]

    def wanted(self, node: int) -> int:
        """How many children of a node of the frontier to look at."""

    def expand(self, children: Seq[Seq[tuple[int, float]]]) -> None:
        """Add children to each node of the frontier: tokens and the draft model's probabilities of them, best first."""

    def finished(self) -> tuple[RankedTree, list[int]]:
        """The draft, in the order of its nodes' values, and which node of `tree` each of its nodes is."""


class DynamicGrowth:
    """Expands what is most likely to be reached, and keeps the best nodes of all (EAGLE-2, 2406.16858).

    The tree ends where one more depth promises too little (OPT-Tree, 2406.17276).

    Args:
        num_nodes: nodes of the finished tree at most.
        max_depth: no node is deeper.
        width: nodes expanded at one depth, and children looked at below each.
        min_gain: accepted tokens that one more depth must promise.
        price: nodes whose chance is not above it are left out.
        confidence: turns the draft model's probabilities into chances of acceptance.
    """

    def __init__(
        self, num_nodes: int, max_depth: int, width: int, min_gain: float, price: float, confidence: Confidence
    ) -> None:
        self.tree = RankedTree()
        self.frontier = [ROOT] if num_nodes > 0 and max_depth > 0 else []
        self._num_nodes, self._max_depth, self._width = num_nodes, max_depth, width
        self._min_gain, self._price, self._confidence = min_gain, price, confidence
        self._factors = confidence.factors()
        self._largest_factor = max(self._factors)
        self._best: list[int] = []
        self._expected = 0.0
        self._depth = 0

    def wanted(self, node: int) -> int:
        return self._width

    def expand(self, children: Seq[Seq[tuple[int, float]]]) -> None:
        tree, confidence = self.tree, self._confidence
        first = len(tree)
        lowest = self._price
        if len(self._best) == self._num_nodes:
            lowest = max(lowest, tree.chances[self._best[-1]])  # what is not above it cannot be among the best
        for node, candidates in zip(self.frontier, children, strict=True):
            above = tree.chance(node)
            for rank, (token_id, probability) in enumerate(candidates):
                if above * probability * self._largest_factor <= lowest:
                    break  # the others are less probable
                level = confidence.level(probability, rank)
                chance = above * min(probability * self._factors[level], 1.0)
                if chance > lowest:
                    tree.add(token_id, node, level, chance)
        self._depth += 1
        self._best = tree.ranked([*self._best, *range(first, len(tree))])[: self._num_nodes]
        self._choose_frontier(first)

    def _choose_frontier(self, first: int) -> None:
        """The best new nodes, those from `first` on, unless growing deeper promises too little."""
        chances, expected = self.tree.chances, self._expected
        self._expected = sum(chances[node] for node in self._best)
        self.frontier = [node for node in self._best if node >= first][: self._width]
        promised = sum(chances[node] for node in self.frontier)  # if their children were sure
        gained = self._expected - expected
        if self._depth >= self._max_depth or min(promised, gained) < self._min_gain:
            self.frontier = []

    def finished(self) -> tuple[RankedTree, list[int]]:
        return self.tree.part(self._best), self._best


class ShapedGrowth:
    """Fills a fixed shape. Nothing is looked at and then left out, so that the tokens may be drawn.

    Args:
        shape: parents first; token_ids are ranks, as from `best_shape`.
    """

    def __init__(self, shape: RankedTree) -> None:
        self.tree = RankedTree()
        self._shape = shape
        self._children = shape.children()
        self._place_of: list[int] = []
        self.frontier = [ROOT] if len(shape) else []

    def wanted(self, node: int) -> int:
        return len(self._below(node))

    def expand(self, children: Seq[Seq[tuple[int, float]]]) -> None:
        tree, first = self.tree, len(self.tree)
        for node, candidates in zip(self.frontier, children, strict=True):
            # a distribution may hold too few tokens
            for place, (token_id, _) in zip(self._below(node), candidates, strict=False):
                tree.add(token_id, node, self._shape.levels[place])
                self._place_of.append(place)
        self.frontier = [node for node in range(first, len(tree)) if self._below(node)]

    def _below(self, node: int) -> list[int]:
        """The children that the shape has where this node stands."""
        return self._children[self._place_of[node] + 1 if node >= 0 else 0]

    def finished(self) -> tuple[RankedTree, list[int]]:
        nodes = sorted(range(len(self.tree)), key=self._place_of.__getitem__)
        return self.tree.part(nodes), nodes


def best_shape(rates: Seq[Seq[float]], num_nodes: int, max_depth: int, price: float = 0.0) -> RankedTree:
    """The shape with the most expected accepted tokens (Sequoia, 2402.12374).

    Args:
        rates: [depth][rank] chance that the child of this rank is the accepted one, given that its parent was
            accepted; row 0 is that of the last committed token's children, deeper nodes than there are rows have the
            last. A rank is never better than the ranks before it: where it was measured so, theirs is taken.
        num_nodes: nodes at most.
        max_depth: no node is deeper.
        price: nodes that are not accepted with a larger chance are left out.

    Returns:
        The tree in the order of its nodes' values; token_ids are ranks, levels count through `rates` row by row.
    """
    falling = [list(accumulate(row, min)) for row in rates]
    width = len(falling[0])
    children = [
        [Child(rate, rank, depth * width + rank, None) for rank, rate in enumerate(row)]
        for depth, row in enumerate(falling)
    ]
    return best_tree(None, lambda _, depth: children[min(depth, len(children) - 1)], num_nodes, max_depth, price)
