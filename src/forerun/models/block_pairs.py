"""A block head whose rows read tokens beside states (`BlockConfig.context_tokens`): an EAGLE-3 layer that computes all
tokens of a block at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.heads.block_config import BlockConfig
from forerun.models.attention.base import Planner
from forerun.models.base import LanguageModel, Rows
from forerun.models.eagle_layer import EagleLayer, ReferenceEagleLayer
from forerun.models.head_layers import HeadLayers
from forerun.models.linear import Linear
from forerun.models.native_eagle import NativeEagleLayer


class PairLayers:
    """The layer of such a head, and its slots' own vectors.

    Attributes:
        planner: of its attention.

    Args:
        made: makes the layers of the head's tensors.
        output: the output layer.
        target: whose embeddings the rows read.
    """

    def __init__(self, made: HeadLayers, config: BlockConfig, output: Linear, target: LanguageModel) -> None:
        of_pairs = config.layer_of_pairs
        self._layer: EagleLayer = (
            ReferenceEagleLayer(made, of_pairs, output)
            if made.library is None
            else NativeEagleLayer(made, of_pairs, output, made.library)
        )
        self.planner: Planner = self._layer.planner
        self._compute, self._target = made.compute, target
        self._slot_embeddings = made.vector("slot_embeddings.weight")
        self._slot_states = made.vector("slot_states.weight")

    def fuse(self, states: Tensor) -> Tensor:
        """As `FusingHeadModel.fuse`. states: [n, layers, hidden_size] in float32 or float64."""
        return self._layer.fuse(states)

    def context(self, batch: Sequence[Rows]) -> None:
        """Compute context rows, each of a token and the fused state of the one before it. They join their caches'
        scratch."""
        tokens = torch.tensor([token for rows in batch for token in rows.token_ids])
        states = [rows.states for rows in batch if rows.states is not None]
        self._layer.keys(batch, self._embedded(tokens), _joined(states).to(self._compute))

    def forward(self, batch: Sequence[Rows], states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Compute blocks, whose slots join their caches' scratch.

        Args:
            batch: whose tokens are all the last committed one of their sequence.
            states: of each block, [hidden_size] the fused state of the token before this one.

        Returns:
            As `BlockLayers.forward`.
        """
        embedding = self._embedded(torch.tensor([rows.token_ids[0] for rows in batch]))
        counts = [len(rows.token_ids) for rows in batch]
        embeddings = [self._slot_embeddings[:count] + one for count, one in zip(counts, embedding, strict=True)]
        own = [self._slot_states[:count] + one for count, one in zip(counts, states, strict=True)]
        logits, outputs = self._layer.blocks(batch, _joined(embeddings), _joined(own))
        return outputs, logits

    def _embedded(self, tokens: Tensor) -> Tensor:
        """[n, hidden_size]."""
        return self._target.embedding_rows(tokens.to(self._target.device)).to(self._compute)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
