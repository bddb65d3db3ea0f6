"""Branching trees.

Of greedy requests, and of those with a seed, a node's children are the tokens that the model would pick first (with a
seed: with the noise that the target adds too, Daliri et al., 2408.07978). Of all others they are drawn without
replacement from the model's distribution (Sequoia, 2402.12374), or they are its most probable tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from forerun.config import PREFILL_CHUNK
from forerun.drafters.growth.base import Growth
from forerun.drafters.growth.growing_chain import Confidence, Picking, picking_of
from forerun.drafters.growth.ranked_tree import Child, RankedTree, best_tree
from forerun.drafters.models.base import DraftingModel
from forerun.drafters.models.state import DraftState
from forerun.errors import ConfigError
from forerun.models import Rows
from forerun.sampling import DeadRows, NoiseKey, keyed_gumbel
from forerun.speculation import Rates
from forerun.types import Draft, Sequence
from forerun.utils.tree import ROOT


class DynamicExpansion:
    """Expands what is most likely to be reached, and keeps the best nodes of all (EAGLE-2, 2406.16858).

    The tree ends where one more depth promises too little (OPT-Tree, 2406.17276).

    Attributes:
        tree: nodes so far, parents first.
        frontier: nodes whose children come next, all of one depth; -1 is the last committed token. Empty at the end.

    Args:
        num_nodes: nodes of the finished tree at most.
        max_depth: no node is deeper.
        width: nodes expanded at one depth, and children looked at below each.
        min_gain: accepted tokens that one more depth must promise.
        min_acceptance_prob: nodes whose probability is not above it are left out.
        confidence: turns the draft model's probabilities into probabilities of acceptance.
    """

    def __init__(
        self,
        num_nodes: int,
        max_depth: int,
        width: int,
        min_gain: float,
        min_acceptance_prob: float,
        confidence: Confidence,
    ) -> None:
        self.tree = RankedTree()
        self.frontier = [ROOT] if num_nodes > 0 and max_depth > 0 else []
        self._num_nodes = num_nodes
        self._max_depth = max_depth
        self._width = width
        self._min_gain = min_gain
        self._min_acceptance_prob = min_acceptance_prob
        self._confidence = confidence
        self._factors = confidence.factors()
        self._largest_factor = max(self._factors)
        self._best: list[int] = []
        self._expected = 0.0
        self._depth = 0

    def wanted(self, node: int) -> int:
        """Return how many children of a node of the frontier to consider."""
        return self._width

    def expand(self, children: Seq[Seq[tuple[int, float]]]) -> None:
        """Add children to each node of the frontier: tokens and the draft model's probabilities of them, best first."""
        tree = self.tree
        confidence = self._confidence
        first = len(tree)
        lowest = self._min_acceptance_prob
        if len(self._best) == self._num_nodes:
            lowest = max(lowest, tree.accept_probs[self._best[-1]])  # what is not above it cannot be among the best
        for node, candidates in zip(self.frontier, children, strict=True):
            above = tree.accept_prob(node)
            for rank, (token_id, probability) in enumerate(candidates):
                if above * probability * self._largest_factor <= lowest:
                    break  # the others are less probable
                level = confidence.level(probability, rank)
                accept_prob = above * min(probability * self._factors[level], 1.0)
                if accept_prob > lowest:
                    tree.add(token_id, node, level, accept_prob)
        self._depth += 1
        self._best = tree.ranked([*self._best, *range(first, len(tree))])[: self._num_nodes]
        self._choose_frontier(first)

    def _choose_frontier(self, first: int) -> None:
        """Set the frontier to the best nodes from `first` on, or end the tree if growing deeper promises too little."""
        accept_probs = self.tree.accept_probs
        expected = self._expected
        self._expected = sum(accept_probs[node] for node in self._best)
        self.frontier = [node for node in self._best if node >= first][: self._width]
        promised = sum(accept_probs[node] for node in self.frontier)  # if their children were sure
        gained = self._expected - expected
        if self._depth >= self._max_depth or min(promised, gained) < self._min_gain:
            self.frontier = []

    def finished(self) -> tuple[RankedTree, list[int]]:
        """Return the draft, in the order of its nodes' values, and which node of `tree` each of its nodes is."""
        return self.tree.part(self._best), self._best


class ShapedExpansion:
    """Fills a fixed shape, with the interface of `DynamicExpansion`. Every token considered is kept, so that tokens may
    be drawn.

    Args:
        shape: parents first; token_ids are ranks, as from `best_shape`.
    """

    def __init__(self, shape: RankedTree) -> None:
        self.tree = RankedTree()
        self._shape = shape
        self._children = shape.children()
        self._shape_node_of: list[int] = []
        self.frontier = [ROOT] if len(shape) else []

    def wanted(self, node: int) -> int:
        return len(self._below(node))

    def expand(self, children: Seq[Seq[tuple[int, float]]]) -> None:
        tree = self.tree
        first = len(self.tree)
        for node, candidates in zip(self.frontier, children, strict=True):
            # a distribution may hold too few tokens
            for position, (token_id, _) in zip(self._below(node), candidates, strict=False):
                tree.add(token_id, node, self._shape.levels[position])
                self._shape_node_of.append(position)
        self.frontier = [node for node in range(first, len(tree)) if self._below(node)]

    def _below(self, node: int) -> list[int]:
        """Return the children that the shape has at the position of this node."""
        return self._children[self._shape_node_of[node] + 1 if node >= 0 else 0]

    def finished(self) -> tuple[RankedTree, list[int]]:
        nodes = sorted(range(len(self.tree)), key=self._shape_node_of.__getitem__)
        return self.tree.part(nodes), nodes


Expansion = DynamicExpansion | ShapedExpansion


def best_shape(rates: Seq[Seq[float]], num_nodes: int, max_depth: int, min_acceptance_prob: float = 0.0) -> RankedTree:
    """Return the shape with the most expected accepted tokens (Sequoia, 2402.12374).

    Args:
        rates: [depth][rank] probability that the child of this rank is the accepted one, given that its parent was
            accepted; row 0 is that of the last committed token's children, deeper nodes than there are rows have the
            last. A rank is never better than the ranks before it: where it was measured so, theirs is taken.
        num_nodes: nodes at most.
        max_depth: no node is deeper.
        min_acceptance_prob: nodes that are not accepted with a larger probability are left out.

    Returns:
        The tree in the order of its nodes' values; token_ids are ranks, levels count through `rates` row by row.
    """
    falling = [list(accumulate(row, min)) for row in rates]
    width = len(falling[0])
    children = [
        [Child(rate, rank, depth * width + rank, None) for rank, rate in enumerate(row)]
        for depth, row in enumerate(falling)
    ]
    return best_tree(
        None, lambda _, depth: children[min(depth, len(children) - 1)], num_nodes, max_depth, min_acceptance_prob
    )


def draw_distinct(probs: Tensor, counts: Seq[int], generator: torch.Generator) -> list[list[int]]:
    """Draw several different tokens from each distribution, one after the other without replacement.

    That is what draws with replacement give once repeats are left out, and those cost one cumulative sum for them all.

    Args:
        probs: [R, V], not negative, not necessarily summing to one.
        counts: [R] how many tokens of each; at least 1.

    Returns:
        The tokens of each row in the order of draws; fewer where no others have any weight.
    """
    drawn: list[list[int]] = [[] for _ in counts]
    rows = list(range(len(counts)))
    weights = probs
    while rows:
        cumulative = weights.cumsum(-1, dtype=torch.float64)  # in float32 the least probable tokens would be lost
        totals = cumulative[:, -1:]
        uniforms = torch.rand(len(rows), 2 * max(counts), dtype=torch.float64, generator=generator)
        picked = torch.searchsorted(cumulative, uniforms * totals, right=True).tolist()
        short = []
        for i, (row, tokens, total) in enumerate(zip(rows, picked, totals[:, 0].tolist(), strict=True)):
            if total > 0:
                found = drawn[row]
                found += dict.fromkeys(tokens)  # none of an earlier turn: those weigh nothing any more
                del found[counts[row] :]
                if len(found) < counts[row]:
                    short.append(i)
        rows = [rows[i] for i in short]
        if rows:
            weights = weights[short].index_put(
                (
                    torch.tensor([i for i, row in enumerate(rows) for _ in drawn[row]]),
                    torch.tensor([token for row in rows for token in drawn[row]]),
                ),
                weights.new_zeros(()),
            )
    return drawn


Children = list[tuple[int, float]]
"""Tokens that may follow a row, best or first drawn first, and the draft model's probabilities of them."""
_SHAPES = ("dynamic", "static")
WIDTH = 8
"""Nodes expanded at one depth of a growing tree, and children looked at below each."""
MIN_GAIN = 0.1
"""Accepted tokens that one more forward of the draft model must promise before a tree grows deeper."""
_DEPTHS = 8
"""Depths whose acceptance is measured apart; deeper ones count as the last."""
_RATES = (0.5, 0.15, 0.08, 0.05, 0.03, 0.02, 0.015, 0.01)
"""Prior probability that a child is accepted, by its rank among its siblings."""
_REFRESH = 16
"""Drafts after which the best shape is found again from what was measured since."""


@dataclass(slots=True, eq=False)
class GrowingTree:
    """One sequence's tree while it grows.

    Attributes:
        state: state of the sequence.
        expansion: decides what is expanded.
        rates: where its nodes' trials are counted.
        rows: node -> the scratch row that it was fed as.
        depth: of the next children's parents.
        probs: [V] of each node that was expanded (-1: the last committed token), if its children were drawn.
    """

    state: DraftState
    expansion: Expansion
    rates: Rates
    rows: dict[int, int] = field(default_factory=dict)
    depth: int = 0
    probs: dict[int, Tensor] = field(default_factory=dict)

    def paths(self) -> list[list[int]]:
        """Return the tokens from below the last committed one to each node of the frontier."""
        tree = self.expansion.tree
        ids = tree.ids
        return [[ids[node] for node in tree.path_to(end)] for end in self.expansion.frontier]

    def next_rows(self) -> tuple[list[int], list[int]]:
        """Return the tokens of the frontier's nodes, and the scratch rows that they follow."""
        tree = self.expansion.tree
        frontier = self.expansion.frontier
        ids = tree.ids
        parents = [self.rows.get(tree.parents[node], ROOT) for node in frontier]
        first = len(self.rows)
        self.rows.update({node: first + i for i, node in enumerate(frontier)})
        return [ids[node] for node in frontier], parents

    def draft(self) -> tuple[Draft, RankedTree]:
        tree, nodes = self.expansion.finished()
        if not nodes:
            return Draft.empty(), tree
        if not self.probs:
            return Draft(tree.ids, tree.parents), tree
        none = torch.zeros_like(self.probs[-1])  # of leaves, whose children were not drawn
        probs = torch.stack([self.probs.get(node, none) for node in (-1, *nodes)])
        return Draft(tree.ids, tree.parents, probs, replacement=False), tree


class TreeGrowth(Growth):
    """Grows trees.

    A dynamic tree expands the most probable nodes, all of one depth in one forward, and keeps the best of all nodes. A
    static one has the shape that measured acceptance by depth and rank makes best. Drawn trees are always of such a
    shape, since a token that was drawn must not be dropped for what it is.

    Args:
        shape: "dynamic" or "static".
        drawn: draw the children for requests without a seed above temperature 0; False takes the most probable ones.
        width: nodes expanded at one depth of a dynamic tree, and children looked at below each (1 or more).
        min_gain: accepted tokens that one more forward must promise a dynamic tree (0 to below 1).

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(self, model: DraftingModel[Any], shape: str, drawn: bool, width: int, min_gain: float) -> None:
        super().__init__(model)
        if shape not in _SHAPES:
            raise ConfigError(f"shape is {shape!r}, but must be one of {', '.join(_SHAPES)}.")
        if width < 1 or not 0 <= min_gain < 1:
            raise ConfigError(
                f"width is {width} and min_gain {min_gain}, but 1 <= width and 0 <= min_gain < 1 is needed."
            )
        self._shape: Literal["dynamic", "static"] = "static" if shape == "static" else "dynamic"
        self._drawn = drawn
        self._width = width
        self._min_gain = min_gain
        self._confidence = {picking: Confidence() for picking in Picking}
        self._rates = {picking: Rates(_RATES * _DEPTHS) for picking in Picking}
        self._shapes: dict[tuple[Picking, int, int, float], RankedTree] = {}
        self._num_drafts = 0

    @property
    def options(self) -> tuple[str, ...]:
        return (f"{self._shape} drawn={self._drawn} width={self._width} min_gain={self._min_gain}",)

    _num_ranks = len(_RATES)
    """Ranks of a child whose acceptance is measured apart."""

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        most = [
            self._model.max_depth(each, max_nodes) * self._width + max_nodes
            for each, max_nodes in zip(sequences, num_draft_tokens, strict=True)
        ]
        num_draft_tokens = self._model.affordable(sequences, num_draft_tokens, most)
        trees = [
            self._plant(each, max_nodes, min_acceptance_prob)
            for each, max_nodes in zip(sequences, num_draft_tokens, strict=True)
        ]
        growing = [tree for tree in trees if tree.expansion.frontier]
        self._model.prefill([tree.state for tree in growing], PREFILL_CHUNK)
        rows = [Rows(tree.state.cache, self._model.unfed(tree.state), None, 1) for tree in growing]
        while growing:
            final = not growing[0].depth  # these tokens have been committed
            result = self._model.feed(rows, [tree.state for tree in growing], final)
            self._expand(growing, result.logits)
            growing = [tree for tree in growing if tree.expansion.frontier]
            rows = []
            for tree in growing:
                tokens, parents = tree.next_rows()
                rows.append(Rows(tree.state.cache, self._model.columns.readable(tokens), parents))
        self._count_draft()
        return [self._harvest(tree) for tree in trees]

    def start_from(self, rates: Seq[float], num_depths: int, weight: float) -> None:
        """Take measured probabilities of a child by depth and rank in place of those that hold for most draft models.

        Args:
            rates: [num_depths * ranks], those of the last committed token's children first.
            weight: trials that each of them counts as.
        """
        ranks = len(rates) // num_depths
        rows = [rates[min(depth, num_depths - 1) * ranks :][: min(ranks, self._num_ranks)] for depth in range(_DEPTHS)]
        prior = [rate for row in rows for rate in (*row, *[0.0] * (self._num_ranks - len(row)))]
        self._rates = {picking: Rates(prior, weight) for picking in Picking}

    def _count_draft(self) -> None:
        """Count a draft; every `_REFRESH` drafts the best shapes are computed again."""
        self._num_drafts += 1
        if self._num_drafts % _REFRESH == 0:
            self._shapes.clear()

    def _plant(self, sequence: Sequence, max_nodes: int, min_acceptance_prob: float) -> GrowingTree:
        picking = picking_of(sequence)
        state = self._model.states[sequence]
        depth = self._model.max_depth(sequence, max_nodes)
        expansion: Expansion
        if self._shape == "static" or self._draws(picking):
            expansion = ShapedExpansion(self._best_shape(picking, max_nodes, depth, min_acceptance_prob))
            return GrowingTree(state, expansion, self._rates[picking])
        confidence = self._confidence[picking]
        expansion = DynamicExpansion(max_nodes, depth, self._width, self._min_gain, min_acceptance_prob, confidence)
        return GrowingTree(state, expansion, confidence.rates)

    def _draws(self, picking: Picking) -> bool:
        return picking is Picking.DRAWN and self._drawn

    def _best_shape(self, picking: Picking, max_nodes: int, depth: int, min_acceptance_prob: float) -> RankedTree:
        """Return the best shape by what has been measured so far; cached for `_REFRESH` drafts."""
        key = (picking, max_nodes, depth, min_acceptance_prob)
        if key not in self._shapes:
            rates = self._rates[picking]
            width = self._num_ranks
            by_depth = [[rates.rate(d * width + rank) for rank in range(width)] for d in range(_DEPTHS)]
            self._shapes[key] = best_shape(by_depth, max_nodes, depth, min_acceptance_prob)
        return self._shapes[key]

    def _expand(self, trees: list[GrowingTree], logits: Tensor) -> None:
        """Give every node of the trees' frontiers its children. logits: [all frontiers' nodes, draft vocabulary]."""
        groups: dict[Picking, list[GrowingTree]] = {}
        rows: dict[Picking, list[int]] = {}
        at = 0
        for tree in trees:
            picking = picking_of(tree.state.sequence)
            size = len(tree.expansion.frontier)
            groups.setdefault(picking, []).append(tree)
            rows.setdefault(picking, []).extend(range(at, at + size))
            at += size
        for picking, members in groups.items():
            children = self._children(picking, members, logits[:at] if len(groups) == 1 else logits[rows[picking]])
            start = 0
            for tree in members:
                end = start + len(tree.expansion.frontier)
                tree.expansion.expand(children[start:end])
                tree.depth += 1
                start = end

    def _children(self, picking: Picking, trees: list[GrowingTree], logits: Tensor) -> list[Children]:
        """Return the children to consider below each row, as many as the row's tree needs. logits: [rows, draft
        vocabulary]."""
        wanted = [tree.expansion.wanted(node) for tree in trees for node in tree.expansion.frontier]
        bad = self._model.non_finite_rows(logits)
        if bad:  # such a row has no children
            logits = logits.index_fill(0, torch.tensor(sorted(bad), device=logits.device), 0.0)
            wanted = [0 if row in bad else count for row, count in enumerate(wanted)]
        values, is_named, dead = self._values(picking, trees, logits)
        wanted = [0 if row in dead else count for row, count in enumerate(wanted)]
        if self._draws(picking):
            probs = iter(values)
            for tree in trees:
                tree.probs.update(zip(tree.expansion.frontier, probs, strict=False))
            return [[(token, 1.0) for token in row] for row in draw_distinct(values, wanted, self._generator)]
        top = values.topk(min(max(wanted), values.shape[1]))
        probabilities = (values if picking is Picking.DRAWN else values.softmax(-1)).gather(-1, top.indices)
        named = top.indices if is_named else self._model.columns.named(top.indices)
        children = []
        for tokens, accept_probs, most in zip(named.tolist(), probabilities.tolist(), wanted, strict=True):
            children.append([child for child in zip(tokens[:most], accept_probs[:most], strict=True) if child[1] > 0])
        return children

    def _values(self, picking: Picking, trees: list[GrowingTree], logits: Tensor) -> tuple[Tensor, bool, DeadRows]:
        """Return [rows, V] what children are ranked by: logits up to a constant, or probabilities for requests without
        a seed; whether the columns are the target's tokens, not those of the draft vocabulary; and the rows that have
        no children."""
        dead: DeadRows = {}
        if picking is Picking.GREEDY and all(
            self._model.pipeline.is_identity(tree.state.sequence.params) for tree in trees
        ):
            return logits[:, : self._model.columns.num_columns], False, dead
        positions = [(tree.state, path) for tree in trees for path in tree.paths()]
        if picking is Picking.DRAWN:
            return self._model.probs(logits, positions, dead), True, dead
        values = self._model.logprobs(logits, positions, dead)
        if picking is Picking.GREEDY:
            return values, True, dead
        keys = []
        for tree in trees:
            sequence = tree.state.sequence
            assert sequence.params.seed is not None
            keys.append(NoiseKey(sequence.params.seed, sequence.choice, len(sequence.token_ids) + tree.depth))
        noise = keyed_gumbel(keys, self._model.vocab_size)
        sizes = torch.tensor([len(tree.expansion.frontier) for tree in trees])
        return noise.repeat_interleave(sizes, 0).add_(values), True, dead

    def _harvest(self, tree: GrowingTree) -> Draft:
        draft, ranked = tree.draft()
        tree.state.remember((ranked, tree.rates) if len(ranked) else None)
        return draft
