"""A small model of the same vocabulary drafts a branching tree.

Of greedy requests, and of those with a seed, a node's children are the tokens that the draft model would pick first
(with a seed: with the noise that the target adds too, Daliri et al., 2408.07978). Of all others they are drawn without
replacement from the draft model's distribution (Sequoia, 2402.12374), or they are its most probable tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from forerun.config import PREFILL_CHUNK
from forerun.drafters.base import Traits
from forerun.drafters.draft_model.base import ModelDrafter
from forerun.drafters.growth.growing_chain import Confidence, Picking, picking_of
from forerun.drafters.growth.ranked_tree import RankedTree
from forerun.drafters.growth.tree import (
    _DEPTHS,
    _RATES,
    _REFRESH,
    _SHAPES,
    MIN_GAIN,
    WIDTH,
    Children,
    DynamicExpansion,
    Expansion,
    GrowingTree,
    ShapedExpansion,
    best_shape,
    draw_distinct,
)
from forerun.errors import ConfigError
from forerun.models import LanguageModel, Rows
from forerun.sampling import NoiseKey, keyed_gumbel
from forerun.speculation import Rates
from forerun.types import Draft, Sequence


class TreeDrafter(ModelDrafter):
    """Drafts trees with a causal language model that shares the target's vocabulary.

    A dynamic tree expands the most probable nodes, all of one depth in one forward, and keeps the best of all nodes. A
    static one has the shape that measured acceptance by depth and rank makes best. Drawn trees are always of such a
    shape, since a token that was drawn must not be dropped for what it is.

    Args:
        model: "bundled-draft", a folder, a hub id, or a loaded Model; None means the bundled draft, which belongs to
            the bundled target, and for other targets, with `quantize`, the target itself.
        shape: "dynamic" or "static".
        drawn: draw the children for requests without a seed above temperature 0; False takes the most probable ones.
        width: nodes expanded at one depth of a dynamic tree, and children looked at below each (1 or more).
        min_gain: accepted tokens that one more forward of the draft model must promise a dynamic tree (0 to below 1).
        dtype: of the model's weights; None takes the target's, or float32 where that is float64 and the draft
            is quantized.
        quantize: "int8" or "int4", what the model's weights are kept in; None: as its files are.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self,
        model: str | Path | LanguageModel | None = None,
        shape: str = "dynamic",
        drawn: bool = True,
        *,
        width: int = WIDTH,
        min_gain: float = MIN_GAIN,
        dtype: str | None = None,
        quantize: str | None = None,
    ) -> None:
        super().__init__(model, dtype, quantize)
        if shape not in _SHAPES:
            raise ConfigError(f"shape is {shape!r}, but must be one of {', '.join(_SHAPES)}.")
        if width < 1 or not 0 <= min_gain < 1:
            raise ConfigError(
                f"width is {width} and min_gain {min_gain}, but 1 <= width and 0 <= min_gain < 1 is needed."
            )
        self._shape: Literal["dynamic", "static"] = "static" if shape == "static" else "dynamic"
        self._drawn, self._width, self._min_gain = drawn, width, min_gain
        self._confidence = {picking: Confidence() for picking in Picking}
        self._rates = {picking: Rates(_RATES * _DEPTHS) for picking in Picking}
        self._shapes: dict[tuple[Picking, int, int, float], RankedTree] = {}
        self._num_drafts = 0

    @property
    def traits(self) -> Traits:
        options = f"{self._shape} drawn={self._drawn} width={self._width} min_gain={self._min_gain}"
        inherited = super().traits
        return replace(inherited, cost_key=(*inherited.cost_key, options))

    _num_ranks = len(_RATES)
    """Ranks of a child whose acceptance is measured apart."""

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        most = [
            self._max_depth(each, max_nodes) * self._width + max_nodes
            for each, max_nodes in zip(sequences, num_draft_tokens, strict=True)
        ]
        num_draft_tokens = self._affordable(sequences, num_draft_tokens, most)
        trees = [
            self._plant(each, max_nodes, min_acceptance_prob)
            for each, max_nodes in zip(sequences, num_draft_tokens, strict=True)
        ]
        growing = [tree for tree in trees if tree.expansion.frontier]
        self._prefill([tree.state for tree in growing], PREFILL_CHUNK)
        rows = [Rows(tree.state.cache, self._unfed(tree.state), None, 1) for tree in growing]
        while growing:
            final = not growing[0].depth  # these tokens have been committed
            result = self._feed(rows, [tree.state for tree in growing], final)
            self._expand(growing, result.logits)
            growing = [tree for tree in growing if tree.expansion.frontier]
            rows = []
            for tree in growing:
                tokens, parents = tree.next_rows()
                rows.append(Rows(tree.state.cache, self._within_vocabulary(tokens), parents))
        self._count_draft()
        return [self._harvest(tree) for tree in trees]

    def _start_from(self, rates: Seq[float], num_depths: int, weight: float) -> None:
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
        picking, state, depth = picking_of(sequence), self._states[sequence], self._max_depth(sequence, max_nodes)
        growth: Expansion
        if self._shape == "static" or self._draws(picking):
            growth = ShapedExpansion(self._best_shape(picking, max_nodes, depth, min_acceptance_prob))
            return GrowingTree(state, growth, self._rates[picking])
        confidence = self._confidence[picking]
        growth = DynamicExpansion(max_nodes, depth, self._width, self._min_gain, min_acceptance_prob, confidence)
        return GrowingTree(state, growth, confidence.rates)

    def _draws(self, picking: Picking) -> bool:
        return picking is Picking.DRAWN and self._drawn

    def _best_shape(self, picking: Picking, max_nodes: int, depth: int, min_acceptance_prob: float) -> RankedTree:
        """Return the best shape by what has been measured so far; cached for `_REFRESH` drafts."""
        key = (picking, max_nodes, depth, min_acceptance_prob)
        if key not in self._shapes:
            rates, width = self._rates[picking], self._num_ranks
            by_depth = [[rates.rate(d * width + rank) for rank in range(width)] for d in range(_DEPTHS)]
            self._shapes[key] = best_shape(by_depth, max_nodes, depth, min_acceptance_prob)
        return self._shapes[key]

    def _expand(self, trees: list[GrowingTree], logits: Tensor) -> None:
        """Give every node of the trees' frontiers its children. logits: [all frontiers' nodes, draft vocabulary]."""
        groups: dict[Picking, list[GrowingTree]] = {}
        rows: dict[Picking, list[int]] = {}
        at = 0
        for tree in trees:
            picking, size = picking_of(tree.state.sequence), len(tree.expansion.frontier)
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
        bad = self._non_finite_rows(logits)
        if bad:  # such a row has no children
            logits = logits.index_fill(0, torch.tensor(sorted(bad), device=logits.device), 0.0)
            wanted = [0 if row in bad else count for row, count in enumerate(wanted)]
        values, is_named = self._values(picking, trees, logits)
        if self._draws(picking):
            probs = iter(values)
            for tree in trees:
                tree.probs.update(zip(tree.expansion.frontier, probs, strict=False))
            return [[(token, 1.0) for token in row] for row in draw_distinct(values, wanted, self._generator)]
        top = values.topk(min(max(wanted), values.shape[1]))
        probabilities = (values if picking is Picking.DRAWN else values.softmax(-1)).gather(-1, top.indices)
        named = top.indices if is_named else self._named(top.indices)
        children = []
        for tokens, accept_probs, most in zip(named.tolist(), probabilities.tolist(), wanted, strict=True):
            children.append([child for child in zip(tokens[:most], accept_probs[:most], strict=True) if child[1] > 0])
        return children

    def _values(self, picking: Picking, trees: list[GrowingTree], logits: Tensor) -> tuple[Tensor, bool]:
        """Return [rows, V] what children are ranked by: logits up to a constant, or probabilities for requests without
        a seed; and whether the columns are the target's tokens, not those of the draft vocabulary."""
        if picking is Picking.GREEDY and all(self._pipeline.is_identity(tree.state.sequence.params) for tree in trees):
            return logits[:, : self._vocab_size], False
        positions = [(tree.state, path) for tree in trees for path in tree.paths()]
        if picking is Picking.DRAWN:
            return self._probs(logits, positions), True
        values = self._logprobs(logits, positions)
        if picking is Picking.GREEDY:
            return values, True
        keys = []
        for tree in trees:
            sequence = tree.state.sequence
            assert sequence.params.seed is not None
            keys.append(NoiseKey(sequence.params.seed, sequence.choice, len(sequence.token_ids) + tree.depth))
        noise = keyed_gumbel(keys, self._vocab_size)
        sizes = torch.tensor([len(tree.expansion.frontier) for tree in trees])
        return noise.repeat_interleave(sizes, 0).add_(values), True

    def _harvest(self, tree: GrowingTree) -> Draft:
        draft, ranked = tree.draft()
        tree.state.remember((ranked, tree.rates) if len(ranked) else None)
        return draft
