"""The target's first layers draft (LayerSkip, Elhoushi et al., 2404.16710), and verification continues from there.

What the first layers compute of a drafted token is what the target would compute of it anyway: keys and values are
written into the target's own cache, the states that leave them are kept, and verification begins at the next layer.
No layer computes a token twice. The final norm and head make tokens of the states; a model that was not trained for
it makes poor ones, which costs speed, never correctness.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from forerun.drafters.base import Binding, NamedModel, Traits
from forerun.drafters.draft_model.chain import ChainDrafter
from forerun.drafters.growth.growing_chain import GrowingChain
from forerun.drafters.models.state import DraftState
from forerun.errors import ConfigError, DrafterError, IncompatibleDrafterError
from forerun.models import Forward, Model, Rows
from forerun.types import Cache, Draft, Sequence
from forerun.utils.tree import Tree

_SHARE = 0.25
"""Share of the target's layers that draft, unless a number is given."""


class EarlyExit(ChainDrafter):
    """Drafts chains with the target's first layers. Their tokens are picked as a draft model's are.

    Args:
        exit_layer: E, how many layers draft; None takes a quarter of the target's (1 or more).

    Raises:
        ConfigError: exit_layer is below 1.
    """

    _has_own_caches = False

    def __init__(self, exit_layer: int | None = None) -> None:
        super().__init__(None)
        if exit_layer is not None and exit_layer < 1:
            raise ConfigError(f"exit_layer is {exit_layer}, but at least one layer must draft.")
        self._exit_layer = exit_layer
        self._num_layers = 0
        self._hidden: dict[DraftState, list[Tensor]] = {}

    @property
    def traits(self) -> Traits:
        return Traits((type(self).__name__, f"{self._num_layers or self._exit_layer} layers"), writes_cache=True)

    @property
    def nbytes(self) -> int:
        """Return 0: keys and values are the target's state."""
        return 0

    def models_to_load(self, target_name: str) -> tuple[NamedModel, ...]:
        """Return no models: the target drafts."""
        return ()

    def bind(self, binding: Binding) -> None:
        """Take the target's first layers.

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
        self._num_layers = self._exit_layer or max(1, round(_SHARE * layers))
        if self._num_layers >= layers:
            raise ConfigError(
                f"exit_layer is {self._num_layers}, but {target.name} has {layers} layers: give a number from 1 to "
                f"{layers - 1}, so that something is left to verify with."
            )
        self._target = target
        self._use_model(target, binding)

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        states = [self._states[sequence] for sequence in sequences]
        self._hidden.clear()
        try:
            drafts = super().draft(sequences, num_draft_tokens, min_acceptance_prob)
            self._finish(states, drafts)
        finally:
            for state in states:
                state.scratch = Tree()  # verification continues from it, and the engine commits or drops it
        return [self._with_states(state, draft) for state, draft in zip(states, drafts, strict=True)]

    def _draft_session(self, growing: list[GrowingChain], with_probabilities: bool, takes_largest: bool) -> None:
        """Return None: the sessions of the target run all of its layers."""

    def _forward(self, rows: Seq[Rows], states: Seq[DraftState]) -> Forward:
        """Run the first layers, and keep the states that leave them."""
        hidden, logits = self._target.forward_first(rows, self._num_layers)
        parts = torch.split(hidden, [len(row.token_ids) for row in rows])
        for state, part in zip(states, parts, strict=True):
            self._hidden.setdefault(state, []).append(part)
        return Forward(logits)

    def _finish(self, states: Seq[DraftState], drafts: Seq[Draft]) -> None:
        """Take every draft's last token through the layers as well, unless the next token was computed already and
        was not worth drafting."""
        incomplete = [
            (state, draft) for state, draft in zip(states, drafts, strict=True) if len(state.scratch) == len(draft) > 0
        ]
        if incomplete:
            rows = [Rows(state.cache, draft.ids[-1:], None, 0) for state, draft in incomplete]
            self._feed(rows, [state for state, _ in incomplete])

    def _with_states(self, state: DraftState, draft: Draft) -> Draft:
        states = self._hidden.get(state)
        if not len(draft) or states is None:
            return draft
        return replace(draft, hidden=torch.cat(states), first_layer=self._num_layers)

    def _cache_for(self, sequence: Sequence) -> Cache:
        if sequence.cache is None:
            raise DrafterError("Early exit drafts in the target's own cache, and this sequence has none.")
        return sequence.cache

    def _free(self, state: DraftState) -> None:
        """Leave the cache to the engine."""
