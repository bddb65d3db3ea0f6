"""Medusa heads as a model that drafts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from forerun.drafters.growth.growing_chain import GrowingChain, Picking
from forerun.drafters.models.base import DraftingModel
from forerun.drafters.models.head_files.source import HeadSource
from forerun.drafters.models.heads.config import HeadConfig, StoredHead
from forerun.drafters.models.heads.drafting import HEAD_FOLLOWS, ChainLimit
from forerun.drafters.models.medusa.config import MedusaConfig
from forerun.drafters.models.medusa.model import MedusaModel, PathCache
from forerun.drafters.models.state import DraftState
from forerun.models import Forward, LanguageModel, Rows
from forerun.sampling import row_argmax
from forerun.types import Sequence, Step


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
        self.target_state = states[-1].clone()
        self.states_end = end

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
