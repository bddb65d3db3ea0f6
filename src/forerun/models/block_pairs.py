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
from forerun.models.runner import lay_out


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
        layout = lay_out(batch, self.planner)
        assert layout.states is not None
        self._layer.keys(layout, self._embedded(layout.token_ids), layout.states.to(self._compute))

    def forward(self, batch: Sequence[Rows], states: Tensor) -> tuple[Tensor, Tensor]:
        """Compute blocks, whose slots join their caches' scratch.

        Args:
            batch: whose tokens are all the last committed one of their sequence.
            states: [blocks, hidden_size] the fused states of the tokens before these.

        Returns:
            As `BlockLayers.forward`.
        """
        layout = lay_out(batch, self.planner)
        counts = [len(rows.token_ids) for rows in batch]
        embedding = self._embedded(torch.tensor([rows.token_ids[0] for rows in batch]))
        rows = [
            (embedding[index] + self._slot_embeddings[:count], states[index] + self._slot_states[:count])
            for index, count in enumerate(counts)
        ]
        embeddings, slots = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*rows, strict=True))
        padding = layout.num_rows - len(slots)
        if padding:
            embeddings, slots = (torch.cat([x, x[-1:].expand(padding, -1)]) for x in (embeddings, slots))
        logits, outputs = self._layer.forward(layout, embeddings, slots)
        return outputs[: layout.num_new], logits[: layout.num_logits]

    def _embedded(self, tokens: Tensor) -> Tensor:
        """[n, hidden_size]."""
        return self._target.embedding_rows(tokens.to(self._target.device)).to(self._compute)
