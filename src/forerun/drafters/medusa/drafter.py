"""Medusa heads draft chains, or trees of the shape that their accuracies make best (Cai et al., 2401.10774).

Each head has a distribution of its own, independent of the others, so that a drawn chain or tree is drawn from a
product of known distributions. Heads in Hydra's order (2402.05109) read the tokens drafted so far, and draft one after
another.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from forerun.drafters.base import Binding
from forerun.drafters.growth.chain import ChainGrowth
from forerun.drafters.growth.growing_chain import GrowingChain, Picking, picking_of
from forerun.drafters.growth.tree import MIN_GAIN, WIDTH, GrowingTree, TreeGrowth
from forerun.drafters.heads.config import HeadConfig, StoredHead
from forerun.drafters.heads.drafting import HEAD_FOLLOWS, ChainLimit
from forerun.drafters.heads.source import HeadSource
from forerun.drafters.medusa.config import MedusaConfig
from forerun.drafters.medusa.model import MedusaModel, PathCache
from forerun.drafters.model_drafter import ModelDrafter
from forerun.drafters.models.base import DraftingModel
from forerun.drafters.models.state import DraftState
from forerun.models import Forward, LanguageModel, Rows
from forerun.sampling import row_argmax
from forerun.types import Draft, Sequence, Step


@dataclass(slots=True, eq=False)
class MedusaState(DraftState):
    """Heads' state for one sequence: the target's state of the last position that it has computed.

    Attributes:
        target_state: [1, H] that state, which all heads read; None: it is not known yet, or belongs to another text.
        states_end: position after it.
    """

    target_state: Tensor | None = None
    states_end: int = 0

    @property
    def path_cache(self) -> PathCache:
        """Return the cache with its type."""
        return cast(PathCache, self.cache)

    @property
    def is_ready(self) -> bool:
        """Return whether the state of the token before the last committed one is known: otherwise nothing can be
        drafted."""
        return self.target_state is not None and self.states_end == len(self.sequence.token_ids) - 1

    def add_states(self, end: int, states: Tensor) -> None:
        """Store the last of the target's states of the positions up to `end`. states: [n, 1, H]."""
        self.target_state, self.states_end = states[-1].clone(), end

    def settle(self, end: int = -1) -> None:
        """Drop the rows of the draft: the heads keep nothing of what was accepted."""
        if len(self.scratch):
            self.drop()

    def unfed(self) -> list[int]:
        """Begin a draft, and return the last committed token."""
        self.settle()
        tokens = self.sequence.token_ids
        self.path_cache.begin(len(tokens) - 1)
        return tokens[-1:]

    def rewind(self, length: int) -> None:
        self.drafted = None
        self.settle()
        if self.states_end > length:
            self.target_state = None


class MedusaHeads(DraftingModel[MedusaState]):
    """Medusa heads (Cai et al., 2401.10774; in Hydra's order: 2402.05109), which read the target's last state."""

    reads_states = True
    follows = HEAD_FOLLOWS

    def __init__(self, model: str | Path | StoredHead[HeadConfig] | None) -> None:
        super().__init__(HeadSource(model, "medusa", _make), MedusaState)
        self._limit = ChainLimit("%(name)s has %(most)d heads, and drafts no more tokens than that.")

    @property
    def heads(self) -> MedusaModel:
        """Return the model with its type, after `bind`."""
        assert isinstance(self.model, MedusaModel)
        return self.model

    def commit(self, steps: Seq[Step]) -> None:
        for step in steps:
            state = self.states[step.sequence]
            state.count_trials()
            state.settle()
            if step.states is not None and len(step.states):
                state.add_states(step.num_computed, step.states)

    def adopt_prefix(self, state: MedusaState) -> None:
        """Adopt nothing: the last token of a prompt is computed in any case, and the heads read no other state."""

    def prefill(self, states: Seq[MedusaState], min_tokens: int, num_computed: Seq[int] | None = None) -> None:
        """Prefill nothing: the heads read no tokens but those of the draft."""

    def max_depth(self, sequence: Sequence, max_nodes: int) -> int:
        state = self.states[sequence]
        room = min(super().max_depth(sequence, max_nodes), self.heads.config.num_heads) if state.is_ready else 0
        state.path_cache.num_heads = room
        return room

    def longest_chain(self, max_nodes: int) -> int:
        return self._limit.of(max_nodes, self.heads.config.num_heads, self.model.name)

    def forward(self, rows: Seq[Rows], states: Seq[MedusaState]) -> Forward:
        batch = []
        for each, state in zip(rows, states, strict=True):
            assert state.target_state is not None
            batch.append(replace(each, states=state.target_state.expand(len(each.token_ids), -1)))
        return self.model.forward(batch)

    def look(self, states: Seq[MedusaState]) -> Tensor:
        """Compute [heads of all sequences, draft vocabulary] logits of heads that read no tokens, and keep them for the
        forwards of this draft."""
        target_states = [state.target_state for state in states if state.target_state is not None]
        return self.heads.look([state.path_cache for state in states], torch.cat(target_states))

    def first_tokens(self, chains: Seq[GrowingChain]) -> list[list[int]]:
        """Return all heads' first tokens for greedy chains, which keep those that sampling options do not change."""
        if self.heads.config.sequential:
            return [[] for _ in chains]
        states = [self.states[chain.sequence] for chain in chains]
        best = self.heads.token_ids[row_argmax(self.look(states))].tolist()
        paths: list[list[int]] = []
        at = 0
        for chain, state in zip(chains, states, strict=True):
            paths.append(best[at : at + chain.max_nodes - 1] if chain.picking is Picking.GREEDY else [])
            at += state.path_cache.num_heads
        return paths


def _make(head: StoredHead[HeadConfig], target: LanguageModel, name: str) -> MedusaModel:
    return MedusaModel(head.of(MedusaConfig, name, "medusa"), target, name)


_PRIOR_WEIGHT = 16.0
"""Trials that a stored accuracy counts as, beside those of the running engine, of which about the last fifty count."""


class Medusa(ModelDrafter):
    """Drafts chains with heads that read the target's last state, all tokens in one pass.

    They draft no more tokens than there are heads.

    Args:
        model: folder of the heads, or heads that were read.
    """

    def __init__(self, model: str | Path | StoredHead[HeadConfig] | None = None) -> None:
        heads = MedusaHeads(model)
        super().__init__("Medusa", heads, ChainGrowth(heads, heads.first_tokens))


class HeadsTreeGrowth(TreeGrowth):
    """Grows trees of which all depths are known at once, where the candidates at a depth are the same below every node
    of the depth before."""

    _model: MedusaHeads

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        drafts = [Draft.empty() for _ in sequences]
        simple = [self._is_simple(sequence) for sequence in sequences]
        for is_simple, make in ((True, self._grown_at_once), (False, super().draft)):
            indices = [index for index, each in enumerate(simple) if each is is_simple]
            if indices:
                made = make(
                    [sequences[index] for index in indices],
                    [num_draft_tokens[index] for index in indices],
                    min_acceptance_prob,
                )
                for index, draft in zip(indices, made, strict=True):
                    drafts[index] = draft
        return drafts

    def _is_simple(self, sequence: Sequence) -> bool:
        """Return whether the candidates at a depth are the same below every node of the depth before."""
        if self._model.heads.config.sequential or picking_of(sequence) is not Picking.GREEDY:
            return False
        return self._model.pipeline.is_identity(self._model.states[sequence].view.params)

    def _grown_at_once(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float
    ) -> list[Draft]:
        """Grow the trees of such sequences: one pass of the heads, and no further products."""
        trees = [
            self._plant(each, max_nodes, min_acceptance_prob)
            for each, max_nodes in zip(sequences, num_draft_tokens, strict=True)
        ]
        growing = [tree for tree in trees if tree.expansion.frontier]
        if growing:
            states = [self._model.states[tree.state.sequence] for tree in growing]
            for state in states:
                state.unfed()
            ranked = self._ranked(self._model.look(states))
            at = 0
            for tree, state in zip(growing, states, strict=True):
                _grow(tree, ranked[at:])
                at += state.path_cache.num_heads
        self._count_draft()
        return [self._harvest(tree) for tree in trees]

    def _ranked(self, logits: Tensor) -> list[list[tuple[int, float]]]:
        """Return each row's first tokens with their probabilities, best first. logits: [rows, draft vocabulary]."""
        bad = self._model.non_finite_rows(logits)
        top = logits.topk(min(max(self._width, self._num_ranks), logits.shape[1]))
        tokens = self._model.heads.token_ids[top.indices].tolist()
        if self._shape == "static":  # by its rates alone
            accept_probs = [[1.0] * len(row) for row in tokens]
        else:
            accept_probs = (top.values - logits.logsumexp(-1, keepdim=True)).exp().tolist()
        rows = [list(zip(*each, strict=True)) for each in zip(tokens, accept_probs, strict=True)]
        return [[] if number in bad else row for number, row in enumerate(rows)]


def _grow(tree: GrowingTree, ranked: Seq[list[tuple[int, float]]]) -> None:
    """Grow a tree to its end. ranked: by depth, the candidates, best first."""
    while tree.expansion.frontier:
        children = ranked[tree.depth]
        tree.expansion.expand([children[: tree.expansion.wanted(node)] for node in tree.expansion.frontier])
        tree.depth += 1


class MedusaTree(ModelDrafter):
    """Drafts trees with heads that read the target's last state.

    A static tree has the shape that is best by the accuracies stored with the heads, and by those measured since.

    Args:
        model: folder of the heads, or heads that were read.
        shape: "dynamic" or "static".
        drawn: draw the children for requests without a seed above temperature 0; False takes the most probable ones.
        width: nodes expanded at one depth of a dynamic tree, and children looked at below each (1 or more).
        min_gain: accepted tokens that one more depth must promise a dynamic tree (0 to below 1).

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self,
        model: str | Path | StoredHead[HeadConfig] | None = None,
        shape: str = "static",
        drawn: bool = True,
        *,
        width: int = WIDTH,
        min_gain: float = MIN_GAIN,
    ) -> None:
        self._heads = MedusaHeads(model)
        self._tree_growth = HeadsTreeGrowth(self._heads, shape, drawn, width, min_gain)
        super().__init__("MedusaTree", self._heads, self._tree_growth)

    def bind(self, binding: Binding) -> None:
        """Bind the heads, and start from the acceptance that was stored with them."""
        super().bind(binding)
        config = self._heads.heads.config
        if config.accuracies:
            self._tree_growth.start_from(config.accuracies, config.num_heads, _PRIOR_WEIGHT)
