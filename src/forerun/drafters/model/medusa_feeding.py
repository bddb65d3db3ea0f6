"""How Medusa heads get the state that they read; what drafts with them knows nothing of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from forerun.drafters.model.draft_cache import DraftState
from forerun.drafters.model.head_drafter import HeadDrafter
from forerun.heads import HeadConfig, MedusaConfig, StoredHead
from forerun.models import Forward, LanguageModel, Rows
from forerun.models.medusa import MedusaModel, PathCache
from forerun.tree import Tree
from forerun.types import Sequence, Step


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
