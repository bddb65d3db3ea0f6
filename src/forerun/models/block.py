"""A block head as it drafts: the keys and values of its context in pages, and all tokens of a block in one pass.

`heads/block_config.py` says what it computes. The linear layers are the target's kind, as an EAGLE head's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.cache import PagePool, SequenceCache
from forerun.heads.block_config import BlockConfig
from forerun.heads.stored import StoredHead
from forerun.kernels.partition import Form
from forerun.kernels.rms_norm import rms_norm
from forerun.models.attention.base import LayerAttention, Layout, cache_of
from forerun.models.base import Forward, LanguageModel, Rows
from forerun.models.block_parts import BlockLayer, BlockParts
from forerun.models.heads import FusingHeadModel
from forerun.models.rotation import Rotation, inverse_frequencies, rotate
from forerun.models.runner import lay_out
from forerun.types import Cache


@dataclass(frozen=True, slots=True)
class Block:
    """A block to be drafted.

    Attributes:
        cache: of its sequence; the context rows below the last committed token are there.
        token_id: the last committed token.
        num_tokens: to be drafted.
    """

    cache: Cache
    token_id: int
    num_tokens: int


class BlockModel(FusingHeadModel):
    """A block head over its target.

    Context row i holds what `fuse` makes of the target's states of token i. `forward` computes such rows, which have
    no logits; `draft` computes blocks.

    Args:
        head: its tensors, in any number format or codes.
        target: whose embeddings, and perhaps output layer, it reads.
        name: for messages and stored costs.

    Raises:
        IncompatibleDrafterError: the target is of another size.
    """

    def __init__(self, head: StoredHead[BlockConfig], target: LanguageModel, name: str = "a head") -> None:
        config = head.config
        super().__init__(head, target, name)
        self.config = config
        self._parts = parts = BlockParts.of(head, target, self.token_ids)
        self.compute_dtype = parts.made.compute
        frequencies = inverse_frequencies(config.rope_theta, config.head_dim)
        self._rotation = Rotation(frequencies, 1.0, self.compute_dtype, target.device)
        heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
        self._form = Form(config.head_dim**-0.5, config.sliding_window)
        layer = LayerAttention(heads, group, config.head_dim, config.head_dim, self._form)
        self._planner = parts.attention.planner([layer] * config.num_layers, target.device)

    @property
    def pool(self) -> PagePool:
        """Where the pages of its caches come from."""
        return self._planner.pool

    def new_cache(self) -> SequenceCache:
        """An empty cache for one sequence."""
        return self._planner.new_cache()

    @torch.inference_mode()
    def fuse(self, taps: Tensor) -> Tensor:
        """[n, hidden_size] in `compute_dtype`: the context rows. taps: [n, layers, hidden_size]."""
        parts, states = self._parts, taps.to(self.device, self.compute_dtype)
        if parts.state_norms is not None:
            each = [self._normed(states[:, i], norm) for i, norm in enumerate(parts.state_norms)]
            states = torch.stack(each, 1)
        return self._normed(parts.made.multiply(parts.fuse, states.flatten(1)), parts.context_norm)

    @torch.inference_mode()
    def forward(self, batch: Sequence[Rows], layers: Sequence[int] = ()) -> Forward:
        """Compute context rows, of which the tokens are not read. They join their caches' scratch.

        Raises:
            ValueError: rows have no states, or layers or logits are asked for.
        """
        if layers or any(rows.states is None or rows.num_wanted for rows in batch):
            raise ValueError("context rows of a block head are states, and have no logits")
        states = torch.cat([rows.states for rows in batch if rows.states is not None])
        config, parts, caches = self.config, self._parts, [_sequence_cache(rows.cache) for rows in batch]
        firsts = [cache.num_scratch for cache in caches]
        positions: list[int] = []
        for cache, first, rows in zip(caches, firsts, batch, strict=True):
            count = len(rows.token_ids)
            cache.feed(range(first - 1, first + count - 1))
            positions += range(cache.length + first, cache.length + first + count)
        heads = parts.made.multiply(parts.context, states.to(self.device, self.compute_dtype))
        # [2, layers, heads, rows, head_dim]
        both = heads.view(len(states), 2, config.num_layers, config.num_kv_heads, config.head_dim).permute(
            1, 2, 3, 0, 4
        )
        turns = self._rotation.at(torch.tensor(positions, device=self.device))
        for index, layer in enumerate(parts.layers):
            keys = self._normed(both[0, index].transpose(0, 1).contiguous(), layer.key_norm)
            rotate(keys, turns)
            keys, start = keys.transpose(0, 1), 0
            for cache, first, rows in zip(caches, firsts, batch, strict=True):
                part = slice(start, start + len(rows.token_ids))
                cache.write(index, first, keys[:, part], both[1, index][:, part])
                start = part.stop
        return Forward(torch.empty(0, self.vocab_size, dtype=self.compute_dtype, device=self.device))

    @torch.inference_mode()
    def draft(self, blocks: Sequence[Block]) -> tuple[Tensor, Tensor]:
        """Compute blocks of several sequences. Their rows join the caches' scratch, to be dropped.

        Returns:
            For the tokens to be drafted, block by block: [T, hidden_size] what the output layer reads, and
            [T, draft_vocab_size] logits without the Markov bias.
        """
        first = self.config.first_slot
        batch = [
            Rows(
                block.cache,
                [block.token_id] + [0] * (first + block.num_tokens - 1),
                num_logits=block.num_tokens,
                is_block=True,
            )
            for block in blocks
        ]
        layout = lay_out(batch, self._planner)
        starts = [0]
        for rows in batch[:-1]:
            starts.append(starts[-1] + len(rows.token_ids))
        parts, anchors = self._parts, torch.tensor(starts, device=self.device)
        x = parts.mask.repeat(layout.num_rows, 1)
        x[anchors] = self.target.embedding_rows(layout.token_ids[anchors]).to(self.compute_dtype)
        for index, layer in enumerate(parts.layers):
            x = self._layer(index, layer, x, layout)
        output = self._normed(layout.wanted(x), parts.norm)
        logits = parts.made.multiply(parts.head, output)
        return output[: layout.num_logits], logits[: layout.num_logits]

    @torch.inference_mode()
    def bias(self, before: Tensor) -> Tensor | None:
        """[n, draft_vocab_size] that the tokens before add to the logits; None without a Markov bias.

        before: [n] int64.
        """
        parts = self._parts
        if parts.before is None or parts.after is None:
            return None
        return parts.made.multiply(parts.after, parts.before[before])

    @torch.inference_mode()
    def acceptance(self, outputs: Tensor, before: Tensor) -> Tensor | None:
        """[n] the estimated chance that each slot's token is accepted; None where the head has no estimate.

        Args:
            outputs: [n, hidden_size], of `draft`.
            before: [n] int64, the token before each.
        """
        parts = self._parts
        if parts.confidence is None:
            return None
        weight, bias = parts.confidence
        if parts.before is not None and self.config.confidence_with_markov:
            outputs = torch.cat([outputs, parts.before[before]], 1)
        return torch.sigmoid(outputs @ weight + bias)

    def _layer(self, index: int, layer: BlockLayer, x: Tensor, layout: Layout) -> Tensor:
        parts, config = self._parts, self.config
        heads = parts.made.multiply(layer.qkv, self._normed(x, layer.input_norm)).view(len(x), -1, config.head_dim)
        rotated = config.num_heads + config.num_kv_heads
        query = self._normed(heads[:, : config.num_heads], layer.query_norm)
        key = self._normed(heads[:, config.num_heads : rotated], layer.key_norm)
        turns = self._rotation.turns(layout)
        rotate(query, turns)
        rotate(key, turns)
        attended = parts.attention.forward(index, query, key, heads[:, rotated:], layout, self._form)
        x = x + parts.made.multiply(layer.out, attended)
        h = parts.made.multiply(layer.gate_up, self._normed(x, layer.mlp_norm))
        wide = config.intermediate_size
        return x + parts.made.multiply(layer.down, F.silu(h[:, :wide]).mul_(h[:, wide:]))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._parts.eps)


def _sequence_cache(cache: Cache) -> SequenceCache:
    return cache_of(SequenceCache, cache)  # type: ignore[type-abstract]  # nothing is made of it
