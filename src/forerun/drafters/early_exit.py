"""The target's first layers draft (LayerSkip, Elhoushi et al., 2404.16710), and verification continues from there.

What the first layers compute of a drafted token is what the target would compute of it anyway: keys and values are
written into the target's own cache, the states that leave them are kept, and verification begins at the next layer.
No layer computes a token twice. The final norm and head make tokens of the states; a model that was not trained for
it makes poor ones, which costs speed, never correctness.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forerun.drafters.base import Traits
from forerun.drafters.growth.chain import ChainGrowth
from forerun.drafters.model_drafter import ModelDrafter
from forerun.drafters.models.first_layers import FirstLayers, TargetSource
from forerun.errors import ConfigError
from forerun.types import Draft, Sequence


class EarlyExit(ModelDrafter):
    """Drafts chains with the target's first layers. Their tokens are picked as a draft model's are.

    Args:
        exit_layer: E, how many layers draft; None takes a quarter of the target's (1 or more).
        draft_vocab: tokens that it can propose (1,000 or more; 0 for all), as in DraftModel.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(self, exit_layer: int | None = None, *, draft_vocab: int | None = None) -> None:
        if exit_layer is not None and exit_layer < 1:
            raise ConfigError(f"exit_layer is {exit_layer}, but at least one layer must draft.")
        self._exit_layer = exit_layer
        self._layers = FirstLayers(TargetSource(exit_layer), draft_vocab)
        super().__init__("EarlyExit", self._layers, ChainGrowth(self._layers))

    @property
    def traits(self) -> Traits:
        num_layers = self._layers.source.num_layers or self._exit_layer
        return Traits((self._kind, f"{num_layers} layers", *self._layers.options), writes_cache=True)

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        layers = self._layers
        layers.begin()
        try:
            drafts = super().draft(sequences, num_draft_tokens, min_acceptance_prob)
            layers.finish(sequences, drafts)
        finally:
            layers.hand_over(sequences)
        return [layers.with_states(sequence, draft) for sequence, draft in zip(sequences, drafts, strict=True)]
