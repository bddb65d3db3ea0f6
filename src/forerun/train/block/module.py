"""A block head as training computes it: blocks at many anchors of some documents at once.

The tensors, their names and their meaning are those of `BlockConfig`. The rows are those of `heads/module.py`: row i
reads the target's state of token i, and the block of an active row i is anchored at token i + 1. Its slots attend to
the rows of the document up to i, and to each other: these are the rows that drafting would have there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.heads.block_config import BlockConfig
from forerun.train.heads.module import Augmentation, HeadLayer, HeadModule, HeadRows, Segment, rotated

Keys = tuple[Tensor, Tensor]
"""Keys and values."""


def attended(config: BlockConfig, rows: HeadRows, query: Tensor, own: Keys, context: Keys) -> Tensor:
    """[A, slots, heads * head_dim].

    Args:
        query: [A, slots, heads, head_dim].
        own: [A, slots, kv heads, head_dim] each. context: [R, kv heads, head_dim] each.
    """
    return torch.cat([_of_document(config, rows, query, own, context, segment) for segment in rows.segments])


def _of_document(
    config: BlockConfig, rows: HeadRows, query: Tensor, own: Keys, context: Keys, segment: Segment
) -> Tensor:
    """Of one document's blocks, [a, slots, heads * head_dim]."""
    here = slice(segment.first_active, segment.last_active)
    key, value = (part[here] for part in own)
    group, width = config.num_heads // config.num_kv_heads, config.head_dim
    count, slots = key.shape[:2]
    # [kv heads, group, a, slots, head_dim]
    q = query[here].view(count, slots, config.num_kv_heads, group, width).permute(2, 3, 0, 1, 4)
    before, after = (part[segment.first : segment.last].transpose(0, 1) for part in context)
    scores = torch.einsum("hgasd,hrd->hgasr", q, before) * width**-0.5
    scores = scores + hidden_rows(config, rows, segment, slots, query)
    inside = torch.einsum("hgasd,athd->hgast", q, key) * width**-0.5
    weights = torch.softmax(torch.cat([scores, inside], -1), -1)
    mixed = torch.einsum("hgasr,hrd->hgasd", weights[..., : before.shape[1]], after)
    mixed = mixed + torch.einsum("hgast,athd->hgasd", weights[..., before.shape[1] :], value)
    return mixed.permute(2, 3, 0, 1, 4).reshape(count, slots, -1)


def hidden_rows(config: BlockConfig, rows: HeadRows, segment: Segment, slots: int, like: Tensor) -> Tensor:
    """[a, 1, r], 0 where the slots of a block attend to a row of the context, and minus infinity elsewhere."""
    last = rows.active[segment.first_active : segment.last_active, None] - segment.first
    columns = torch.arange(segment.last - segment.first, device=last.device)
    hidden = columns > last
    if config.sliding_window is not None:  # counted from the last slot
        hidden |= last + slots - columns >= config.sliding_window
    return torch.zeros(hidden.shape, dtype=like.dtype, device=last.device).masked_fill_(hidden, -torch.inf)[:, None]


def blocks_of_pairs(
    head: HeadModule,
    config: BlockConfig,
    rows: HeadRows,
    states: Tensor,
    embeddings: Tensor,
    dtype: torch.dtype,
    augment: Augmentation | None,
) -> Tensor:
    """As `blocks`, of a head with `context_tokens`."""
    layer = _PairLayer(head, config, dtype, rows)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    fused, following = layer.fused(states[rows.states].to(wide), augment), embeddings.to(wide)[rows.states + 1]
    keys, values = layer.keys(layer.read(following, fused), rows.positions)
    own_embeddings = following[rows.active][:, None] + layer.weights["slot_embeddings"][: rows.steps].to(wide)
    own_states = fused[rows.active][:, None] + layer.weights["slot_states"][: rows.steps].to(wide)
    return layer.forward(own_embeddings, own_states, keys, values)


class _PairLayer(HeadLayer[BlockConfig]):
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


class BlockHead(HeadModule):
    """The trained tensors of a head, float32, under their names; NaN until they are set."""

    config: BlockConfig


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
