"""The target's first layers as a model that drafts. Their keys and values are the target's own."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from forerun.drafters.base import Binding, NamedModel
from forerun.drafters.models.base import BoundModel, DraftingModel
from forerun.drafters.models.draft_model import SharedVocabulary
from forerun.drafters.models.state import DraftState
from forerun.errors import ConfigError, DrafterError, IncompatibleDrafterError
from forerun.models import Forward, Model, Rows
from forerun.models.draft_session import Pick
from forerun.types import Cache, Draft, Sequence
from forerun.utils.tree import Tree

_SHARE = 0.25
"""Share of the target's layers that draft, unless a number is given."""


class TargetSource:
    """The target itself (`DraftModelSource`).

    Attributes:
        num_layers: that draft; 0 before `read`.

    Args:
        exit_layer: as of `EarlyExit`.
    """

    def __init__(self, exit_layer: int | None) -> None:
        self._exit_layer = exit_layer
        self.num_layers = 0

    def to_load(self, target_name: str) -> tuple[NamedModel, ...]:
        return ()

    def read(self, binding: Binding) -> BoundModel:
        """Take the target.

        Raises:
            ConfigError: exit_layer is not below the target's number of layers.
            IncompatibleDrafterError: the target cannot be left in the middle.
        """
        target = binding.target
        if not isinstance(target, Model) or not target.can_exit_early:
            raise IncompatibleDrafterError(
                f"{target.name} runs through its own Transformers modules, which cannot be left after some layers. "
                "Early exit is for models that the fused decoder computes. Take another drafter."
            )
        layers = target.num_layers
        self.num_layers = self._exit_layer or max(1, round(_SHARE * layers))
        if self.num_layers >= layers:
            raise ConfigError(
                f"exit_layer is {self.num_layers}, but {target.name} has {layers} layers: give a number from 1 to "
                f"{layers - 1}, so that something is left to verify with."
            )
        return BoundModel(target, SharedVocabulary(target.vocab_size, target.vocab_size))


class FirstLayers(DraftingModel[DraftState]):
    """The target's first layers. Their keys and values are the target's own."""

    has_own_caches = False
    source: TargetSource

    def __init__(self, source: TargetSource, draft_vocab: int | None) -> None:
        super().__init__(source, DraftState, draft_vocab)
        self._hidden: dict[DraftState, list[Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Return 0: keys and values are the target's state."""
        return 0

    def cache_for(self, sequence: Sequence) -> Cache:
        if sequence.cache is None:
            raise DrafterError("Early exit drafts in the target's own cache, and this sequence has none.")
        return sequence.cache

    def draft_session(self, states: Seq[DraftState], pick: Pick) -> None:
        """Return None: the sessions of the target run all of its layers."""

    def forward(self, rows: Seq[Rows], states: Seq[DraftState]) -> Forward:
        """Run the first layers, and keep the states that leave them."""
        target = self.model
        assert isinstance(target, Model)
        hidden, logits = target.forward_first(rows, self.source.num_layers)
        parts = torch.split(hidden, [len(row.token_ids) for row in rows])
        for state, part in zip(states, parts, strict=True):
            self._hidden.setdefault(state, []).append(part)
        return Forward(logits)

    def begin(self) -> None:
        """Forget the states of the last drafts."""
        self._hidden.clear()

    def finish(self, sequences: Seq[Sequence], drafts: Seq[Draft]) -> None:
        """Take every draft's last token through the layers as well, unless the next token was computed already and
        was not worth drafting."""
        states = [self.states[sequence] for sequence in sequences]
        incomplete = [
            (state, draft) for state, draft in zip(states, drafts, strict=True) if len(state.scratch) == len(draft) > 0
        ]
        if incomplete:
            rows = [Rows(state.cache, draft.ids[-1:], None, 0) for state, draft in incomplete]
            self.feed(rows, [state for state, _ in incomplete])

    def hand_over(self, sequences: Seq[Sequence]) -> None:
        """Leave the rows to verification, which continues from them; the engine commits or drops them."""
        for sequence in sequences:
            self.states[sequence].scratch = Tree()

    def with_states(self, sequence: Sequence, draft: Draft) -> Draft:
        """Return the draft with the states that verification continues from."""
        states = self._hidden.get(self.states[sequence])
        if not len(draft) or states is None:
            return draft
        return replace(draft, hidden=torch.cat(states), first_layer=self.source.num_layers)
