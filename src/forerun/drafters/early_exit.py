"""The target's own first layers draft (LayerSkip, Elhoushi et al., 2404.16710), and verification goes on from there.

What the first layers compute of a drafted token is what the target would compute of it anyway: keys and values are
written into the target's own cache, the states that leave them are kept, and verification begins at the next layer.
No layer computes a token twice. The final norm and head make tokens of the states; a model that was not trained for
it makes poor ones, which costs speed, never correctness.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forerun.cache import SequenceCache
from forerun.config import EARLY_EXIT_SHARE
from forerun.drafters.binding import Binding
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.own_model import Own
from forerun.errors import ConfigError, IncompatibleDrafterError
from forerun.models import Model, Rows
from forerun.types import Draft, Sequence


class FirstLayers:
    """The first layers of a model, its final norm and its head, as a model; it keeps the states it has computed.

    Attributes:
        states: by the id of the cache, [n, H] of the rows of each forward since the last `forget`.
    """

    def __init__(self, model: Model, num_layers: int) -> None:
        self._model = model
        self.num_layers = num_layers
        self.states: dict[int, list[Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: Seq[Rows]) -> Tensor:
        """As Model.forward, through the first layers."""
        hidden, logits = self._model.forward_first(batch, self.num_layers)
        start = 0
        for rows in batch:
            end = start + len(rows.token_ids)
            self.states.setdefault(id(rows.cache), []).append(hidden[start:end])
            start = end
        return logits

    def forget(self) -> None:
        """Before a new draft."""
        self.states.clear()


class EarlyExit(DraftModel):
    """Drafts chains with the target's first layers. Their tokens are picked as a draft model's are.

    Args:
        exit_layer: E, how many layers draft; None takes a share of the target's (config.EARLY_EXIT_SHARE).
        num_draft_tokens: K; None takes the engine's.

    Raises:
        ConfigError: exit_layer is below 1.
    """

    writes_cache = True

    def __init__(self, exit_layer: int | None = None, num_draft_tokens: int | None = None) -> None:
        super().__init__(None, num_draft_tokens)
        if exit_layer is not None and exit_layer < 1:
            raise ConfigError(f"exit_layer is {exit_layer}, but at least one layer must draft.")
        self._exit_layer = exit_layer

    @property
    def nbytes(self) -> int:
        """Nothing: keys and values are the target's own."""
        return 0

    def bind(self, binding: Binding) -> None:
        """Take the target's first layers.

        Raises:
            ConfigError: exit_layer is not below the target's number of layers.
            IncompatibleDrafterError: the target cannot be left in the middle.
        """
        target = binding.target
        if not getattr(target, "can_exit_early", False):
            raise IncompatibleDrafterError(
                f"{target.name} runs through its own Transformers modules, which cannot be left after some layers. "
                "Early exit is for the architectures of the lean path (Llama, Mistral, Qwen2, Qwen3). "
                "Take another drafter."
            )
        layers = target.num_layers
        exit_layer = self._exit_layer or max(1, round(EARLY_EXIT_SHARE * layers))
        if exit_layer >= layers:
            raise ConfigError(
                f"exit_layer is {exit_layer}, but {target.name} has {layers} layers: give a number from 1 to "
                f"{layers - 1}, so that something is left to verify with."
            )
        self._first = FirstLayers(target, exit_layer)
        model: Any = self._first
        self._serve(model, binding)

    def draft(self, sequences: Seq[Sequence], budgets: Seq[int], price: float = 0.0) -> list[Draft]:
        own = [self._owned[sequence] for sequence in sequences]
        lengths = [each.cache.length for each in own]
        self._first.forget()
        try:
            drafts = super().draft(sequences, budgets, price)
            self._finish(own, drafts)
        finally:
            for each, length in zip(own, lengths, strict=True):
                each.cache.truncate(length)  # what lies beyond stays there, as scratch of the coming verification
                each.guessed = []
        return [self._with_states(each, draft) for each, draft in zip(own, drafts, strict=True)]

    def _finish(self, own: Seq[Own], drafts: Seq[Draft]) -> None:
        """Take every draft's last token through the layers as well, unless it was asked already what follows it, and
        the answer did not pay."""
        states = self._first.states
        rows = [
            Rows(each.cache, draft.token_ids[-1:].tolist(), None, 0)
            for each, draft in zip(own, drafts, strict=True)
            if len(draft) and sum(map(len, states[id(each.cache)])) == len(draft)
        ]
        if rows:
            self._first.forward(rows)

    def _with_states(self, own: Own, draft: Draft) -> Draft:
        states = self._first.states.get(id(own.cache))
        if not len(draft) or states is None:
            return draft
        return replace(draft, hidden=torch.cat(states), first_layer=self._first.num_layers)

    def _cache_for(self, sequence: Sequence) -> SequenceCache:
        cache: SequenceCache = sequence.cache
        return cache

    def _free(self, own: Own) -> None:
        """The cache is the engine's."""
