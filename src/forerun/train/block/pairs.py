"""A block head whose rows read tokens beside states (`BlockConfig.context_tokens`), as training computes it.

Row i of `heads/rows.py` reads the embedding of token i + 1 and the target's states of token i, as that of an EAGLE head
does. The slots of the block of an active row i read the same, with vectors of their own added; they stand behind row i,
and attend to the rows of the document up to i, and to each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.heads.block_config import BlockConfig
from forerun.train.block.attention import attended
from forerun.train.heads.module import Augmentation, HeadLayer, HeadModule, rotated
from forerun.train.heads.rows import HeadRows


def blocks_of_pairs(
    head: HeadModule,
    config: BlockConfig,
    rows: HeadRows,
    states: Tensor,
    embeddings: Tensor,
    dtype: torch.dtype,
    augment: Augmentation | None,
) -> Tensor:
    """As `module.blocks`, of a head with `context_tokens`."""
    layer = _Layer(head, config, dtype, rows)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    fused, following = layer.fused(states[rows.states].to(wide), augment), embeddings.to(wide)[rows.states + 1]
    keys, values = layer.keys(layer.read(following, fused), rows.positions)
    own_embeddings = following[rows.active][:, None] + layer.weights["slot_embeddings"][: rows.steps].to(wide)
    own_states = fused[rows.active][:, None] + layer.weights["slot_states"][: rows.steps].to(wide)
    return layer.forward(own_embeddings, own_states, keys, values)


class _Layer(HeadLayer[BlockConfig]):
    """The layer; the slots' vectors keep their type."""

    def __init__(self, head: HeadModule, config: BlockConfig, dtype: torch.dtype, rows: HeadRows) -> None:
        super().__init__(head, config, dtype, prefix="midlayer.", kept="slot_")
        self.rows = rows

    def fused(self, states: Tensor, augment: Augmentation | None) -> Tensor:
        """[R, layers, H] -> [R, H]. There may be one layer more."""
        return self.linear("fc", self.joined(states, augment))

    def read(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """[..., 2 H], what queries, keys and values are computed from."""
        return torch.cat([self.norm("input_layernorm", embeddings), self.norm("hidden_norm", states)], -1)

    def keys(self, read: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[..., kv heads, head_dim] keys and values of rows at these positions."""
        key, value = self.heads("k", read), self.heads("v", read)
        return rotated(key, positions, self.config.rope_theta), value

    def heads(self, kind: str, read: Tensor) -> Tensor:
        """[..., heads, head_dim]."""
        found = self.linear(f"self_attn.{kind}_proj", read)
        return found.view(*read.shape[:-1], -1, self.config.head_dim)

    def forward(self, embeddings: Tensor, states: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[A, slots, H], what the output layer reads. embeddings, states: [A, slots, H]. keys, values: of all rows."""
        rows = self.rows
        read = self.read(embeddings, states)
        positions = rows.positions[rows.active, None] + 1 + torch.arange(read.shape[1], device=read.device)
        query = rotated(self.heads("q", read), positions, self.config.rope_theta)
        own = self.keys(read, positions)
        x = self.norm("hidden_norm", states) + self.linear("embedding_residual", embeddings)
        x = x + self.linear("self_attn.o_proj", attended(self.config, rows, query, own, (keys, values)))
        return self.norm("norm", self.feed_forward(x))
