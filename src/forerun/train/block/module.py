"""A block head as training computes it: blocks at many anchors of some documents at once.

The tensors, their names and their meaning are those of `BlockConfig`. The rows are those of `heads/rows.py`: row i
reads the target's state of token i, and the block of an active row i is anchored at token i + 1. Its slots attend to
the rows of the document up to i, and to each other: these are the rows that drafting would have there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.heads.block_config import BlockConfig
from forerun.train.block.attention import attended
from forerun.train.block.pairs import blocks_of_pairs
from forerun.train.heads.module import Augmentation, HeadLayer, HeadModule, rotated
from forerun.train.heads.rows import HeadRows


class BlockHead(HeadModule):
    """The trained tensors of a head, float32, under their names; NaN until they are set."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self.config: BlockConfig = config


def blocks(
    head: BlockHead,
    rows: HeadRows,
    states: Tensor,
    embeddings: Tensor,
    mask: Tensor | None,
    dtype: torch.dtype = torch.bfloat16,
    augment: Augmentation | None = None,
) -> Tensor:
    """[A, K, hidden], what the output layer reads for the K tokens of each active row's block.

    Args:
        rows: unrolled as many steps as tokens are drafted.
        states: [N, layers, hidden] of the documents' tokens; there may be one more, which is not read.
        embeddings: [N, hidden] of the same, unscaled.
        mask: [hidden], what stands in the slots after the first; None where they hold no mask.
        dtype: of products; sums, norms and the residual are in float32, or float64 for float64.

    Raises:
        ConfigError: a block has fewer tokens than there are steps.
    """
    if rows.steps > head.config.block_size:
        size = head.config.block_size
        raise ConfigError(f"blocks of {size} tokens draft no {rows.steps} tokens. Ask for {size}.")
    config = head.config
    if config.context_tokens:
        return blocks_of_pairs(head, config, rows, states, embeddings, dtype, augment)
    assert mask is not None
    layer = _Layers(head, dtype, rows)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    context = layer.fused(states[rows.states].to(wide), augment)
    slots = rows.steps + config.first_slot
    x = mask.to(wide).expand(len(rows.active), slots, -1)
    x = torch.cat([embeddings[rows.tokens[0]].to(wide)[:, None], x[:, 1:]], 1)
    for index in range(config.num_layers):
        x = layer.forward(f"layers.{index}.", context, x)
    return layer.norm("norm", x[:, config.first_slot :])


class _Layers(HeadLayer[BlockConfig]):
    """The decoder layers with their weights in `dtype`."""

    def __init__(self, head: BlockHead, dtype: torch.dtype, rows: HeadRows) -> None:
        super().__init__(head, head.config, dtype)
        self.rows = rows

    def fused(self, states: Tensor, augment: Augmentation | None) -> Tensor:
        """[R, layers, H] -> [R, H]: the context. There may be one layer more."""
        return self.norm("hidden_norm", self.linear("fc", self.joined(states, augment)))

    def forward(self, name: str, context: Tensor, x: Tensor) -> Tensor:
        """x: [A, slots, H]."""
        normed = self.norm(f"{name}input_layernorm", x)
        positions = self.rows.positions[self.rows.active, None] + 1 + torch.arange(x.shape[1], device=x.device)
        query = self.heads(name, "q", normed, positions)
        key, value = self.heads(name, "k", normed, positions), self.heads(name, "v", normed)
        keys, values = self.heads(name, "k", context, self.rows.positions), self.heads(name, "v", context)
        found = attended(self.config, self.rows, query, (key, value), (keys, values))
        return self.feed_forward(x + self.linear(f"{name}self_attn.o_proj", found), name)

    def heads(self, name: str, kind: str, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """[..., heads, head_dim], normed and rotated where there are positions, [...]."""
        found = self.linear(f"{name}self_attn.{kind}_proj", x)
        found = found.view(*x.shape[:-1], -1, self.config.head_dim)
        if positions is None:
            return found
        return rotated(self.norm(f"{name}self_attn.{kind}_norm", found), positions, self.config.rope_theta)
