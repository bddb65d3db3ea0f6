"""Medusa heads draft chains, or trees of the shape that their accuracies make best (Cai et al., 2401.10774).

Each head has a distribution of its own, whatever the others say, so that a drawn chain or tree is drawn from a product
of known distributions. Heads in Hydra's order (2402.05109) know the tokens drafted so far, and draft one after another.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from forerun.drafters.base import Binding
from forerun.drafters.draft_model.cache import DraftState
from forerun.drafters.draft_model.chain import DraftModel
from forerun.drafters.draft_model.growing_chain import GrowingChain, Picking, picking_of
from forerun.drafters.draft_model.tree import MIN_GAIN, WIDTH, DraftTree, GrowingTree
from forerun.drafters.heads.config import HeadConfig, StoredHead
from forerun.drafters.heads.drafter import HeadDrafter
from forerun.drafters.medusa.config import MedusaConfig
from forerun.drafters.medusa.model import MedusaModel, PathCache
from forerun.models import Forward, LanguageModel, Rows
from forerun.sampling import row_argmax
from forerun.types import Draft, Sequence, Step
from forerun.utils.tree import Tree

# How Medusa heads get the state that they read; what drafts with them knows nothing of it.


@dataclass(slots=True, eq=False)
class MedusaState(DraftState):
    """Heads' state for one sequence: the target's state of the last position that it has computed.

    Attributes:
        told: [1, H] that state, which all heads read; None: it was not told yet, or belongs to another text.
        told_to: positions up to it.
    """

    told: Tensor | None = None
    told_to: int = 0

    @property
    def path_cache(self) -> PathCache:
        """The cache as what it is."""
        return cast(PathCache, self.cache)

    @property
    def is_level(self) -> bool:
        """Whether the state of the token before the last committed one is there: only then can anything be drafted."""
        return self.told is not None and self.told_to == len(self.sequence.token_ids) - 1

    def tell(self, end: int, states: Tensor) -> None:
        """The target's states of the positions up to `end`. states: [n, 1, H]."""
        self.told, self.told_to = states[-1].clone(), end

    def settle(self, end: int = -1) -> None:
        """Drop the rows of the draft: the heads keep nothing of what was accepted."""
        if len(self.scratch):
            self.cache.drop()
            self.scratch = Tree()

    def unfed(self) -> list[int]:
        """The last committed token, with which a draft begins."""
        self.settle()
        tokens = self.sequence.token_ids
        self.path_cache.begin(len(tokens) - 1)
        return tokens[-1:]

    def rewind(self, length: int) -> None:
        """As `DraftState.rewind`."""
        self.drafted = None
        self.settle()
        if self.told_to > length:
            self.told = None


class MedusaFeeding(HeadDrafter):
    """The base of drafters that run Medusa heads (Cai et al., 2401.10774; in Hydra's order: 2402.05109)."""

    _states: dict[Sequence, MedusaState]  # type: ignore[assignment]
    _example = "medusa"

    @property
    def _heads(self) -> MedusaModel:
        assert isinstance(self._model, MedusaModel)
        return self._model

    def _of_head(self, head: StoredHead[HeadConfig], target: LanguageModel, name: str) -> MedusaModel:
        return MedusaModel(head.of(MedusaConfig, name, "medusa"), target, name)

    def commit(self, steps: Seq[Step]) -> None:
        for step in steps:
            state = self._states[step.sequence]
            state.count_trials()
            state.settle()
            if step.states is not None and len(step.states):
                state.tell(step.num_computed, step.states)

    def _new_state(self, sequence: Sequence, view: Sequence) -> MedusaState:
        return MedusaState(sequence, self._cache_for(sequence), view)

    def _take_over(self, state: DraftState) -> None:
        """Nothing: the last token of a prompt is computed in any case, and its state is all that the heads read."""

    def _catch_up(self, states: Seq[DraftState], max_lag: int, num_computed: Seq[int] | None = None) -> None:
        """Nothing: the heads read no tokens but those of the draft."""

    def _room(self, sequence: Sequence, budget: int) -> int:
        state = self._states[sequence]
        room = min(super()._room(sequence, budget), self._heads.config.num_heads) if state.is_level else 0
        state.path_cache.num_heads = room
        return room

    def _forward(self, rows: Seq[Rows], states: Seq[MedusaState]) -> Forward:  # type: ignore[override]
        batch = []
        for each, state in zip(rows, states, strict=True):
            assert state.told is not None
            batch.append(replace(each, states=state.told.expand(len(each.token_ids), -1)))
        return self.model.forward(batch)

    def _look(self, states: Seq[MedusaState]) -> Tensor:
        """[heads of all sequences, draft vocabulary] what heads that know no tokens say, kept for the forwards of this
        draft. The sequences' drafts have begun."""
        told = [state.told for state in states if state.told is not None]
        return self._heads.look([state.path_cache for state in states], torch.cat(told))


_CAPPED = "%(name)s has %(most)d heads, and drafts no more tokens than that."
_PRIOR_WEIGHT = 16.0
"""Trials that a stored accuracy counts as, beside those of the running engine, of which about the last fifty count."""


class Medusa(MedusaFeeding, DraftModel):
    """Drafts chains with heads that read the target's last state, all tokens in one pass.

    They draft no more tokens than there are heads.

    Args:
        model: folder of the heads, or heads that were read.
    """

    def _room(self, sequence: Sequence, budget: int) -> int:
        return super()._room(sequence, self._capped(budget, self._heads.config.num_heads, _CAPPED))

    def _prepare(self, chains: list[GrowingChain]) -> None:
        """Greedy chains have all heads' first tokens proposed: those that options do not change are kept at once."""
        super()._prepare(chains)
        if self._heads.config.sequential or not chains:
            return
        states = [self._states[chain.sequence] for chain in chains]
        best = self._heads.token_ids[row_argmax(self._look(states))].tolist()
        at = 0
        for chain, state in zip(chains, states, strict=True):
            if chain.picking is Picking.GREEDY:
                chain.proposed = best[at : at + chain.budget - 1]
            at += state.path_cache.num_heads


class MedusaTree(MedusaFeeding, DraftTree):
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
        DraftTree.__init__(self, None, shape, drawn, width=width, min_gain=min_gain)
        self._read_head(model)

    def bind(self, binding: Binding) -> None:
        """As `HeadDrafter.bind`."""
        super().bind(binding)
        config = self._heads.config
        if config.accuracies:
            self._start_from(config.accuracies, config.num_heads, _PRIOR_WEIGHT)

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        drafts = [Draft.empty() for _ in sequences]
        simple = [self._is_simple(sequence) for sequence in sequences]
        for is_simple, make in ((True, self._grown_at_once), (False, super().draft)):
            places = [place for place, each in enumerate(simple) if each is is_simple]
            if places:
                made = make(
                    [sequences[place] for place in places],
                    [num_draft_tokens[place] for place in places],
                    min_acceptance_prob,
                )
                for place, draft in zip(places, made, strict=True):
                    drafts[place] = draft
        return drafts

    def _is_simple(self, sequence: Sequence) -> bool:
        """Whether what may stand at a depth is the same below every node of the depth before."""
        if self._heads.config.sequential or picking_of(sequence) is not Picking.GREEDY:
            return False
        return self._pipeline.is_identity(self._states[sequence].view.params)

    def _grown_at_once(self, sequences: Seq[Sequence], budgets: Seq[int], min_acceptance_prob: float) -> list[Draft]:
        """Trees of such sequences: one pass of the heads, and no further products."""
        trees = [
            self._plant(each, budget, min_acceptance_prob) for each, budget in zip(sequences, budgets, strict=True)
        ]
        growing = [tree for tree in trees if tree.growth.frontier]
        if growing:
            states = [self._states[tree.state.sequence] for tree in growing]
            for state in states:
                state.unfed()
            ranked = self._ranked(self._look(states))
            at = 0
            for tree, state in zip(growing, states, strict=True):
                _grow(tree, ranked[at:])
                at += state.path_cache.num_heads
        self._count_draft()
        return [self._harvest(tree) for tree in trees]

    def _ranked(self, logits: Tensor) -> list[list[tuple[int, float]]]:
        """Of each row the first tokens with their probabilities, best first. logits: [rows, draft vocabulary]."""
        bad = self._non_finite_rows(logits)
        top = logits.topk(min(max(self._width, self._num_ranks), logits.shape[1]))
        tokens = self._heads.token_ids[top.indices].tolist()
        if self._shape == "static":  # by its rates alone
            accept_probs = [[1.0] * len(row) for row in tokens]
        else:
            accept_probs = (top.values - logits.logsumexp(-1, keepdim=True)).exp().tolist()
        rows = [list(zip(*each, strict=True)) for each in zip(tokens, accept_probs, strict=True)]
        return [[] if number in bad else row for number, row in enumerate(rows)]


def _grow(tree: GrowingTree, ranked: Seq[list[tuple[int, float]]]) -> None:
    """Grow a tree to its end. ranked: by depth, what may stand there, best first."""
    while tree.growth.frontier:
        children = ranked[tree.depth]
        tree.growth.expand([children[: tree.growth.wanted(node)] for node in tree.growth.frontier])
        tree.depth += 1
