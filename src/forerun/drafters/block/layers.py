"""The layers of a block head and what surrounds them: the contract, and the computation in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.drafters.block.config import BlockConfig
from forerun.drafters.heads.layers import HeadLayers, head_attention, state_norms
from forerun.kernels.torch.elementwise import rms_norm
from forerun.kv_cache import SequenceCache
from forerun.models.attention.base import Layout, Planner, cache_of
from forerun.models.base import LanguageModel, Rows
from forerun.models.linear import Linear
from forerun.models.rotation import Rotation, inverse_frequencies, pair_halves, rotate
from forerun.models.runner import lay_out
from forerun.types import Cache

# The weights of a block head in the form in which they are multiplied, which is the target's.


@dataclass(frozen=True, slots=True, eq=False)
class BlockEnds:
    """What a block begins with, and what its tokens are drawn by beside the logits.

    Attributes:
        mask: [hidden] what stands in the slots after the first; None of a head with `context_tokens`.
        before: [vocab_size, rank] W1, and `after` W2, of the Markov bias; None without.
        confidence: weight [width] and bias of the estimate; None without.
    """

    mask: Tensor | None
    before: Tensor | None
    after: Linear | None
    confidence: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, made: HeadLayers, config: BlockConfig, target: LanguageModel, token_ids: Tensor) -> BlockEnds:
        """Of a head's tensors. token_ids: [draft_vocab_size] the target's tokens that it can propose."""
        mask = None
        if config.mask_token_id is not None:
            mask = target.embedding_rows(torch.tensor([config.mask_token_id]))[0].to(target.device, made.compute)
        elif not config.context_tokens:
            mask = made.vector("mask_embedding.weight")
        before, after = _markov(made, config, target, token_ids) if config.markov_rank else (None, None)
        sure = "confidence_head.proj" if config.confidence else None
        return cls(
            mask=mask,
            before=before,
            after=after,
            confidence=(made.vector(f"{sure}.weight")[0], made.vector(f"{sure}.bias")[0]) if sure else None,
        )


def _markov(made: HeadLayers, config: BlockConfig, target: LanguageModel, token_ids: Tensor) -> tuple[Tensor, Linear]:
    """[vocab_size, rank] W1, and W2, of the bias; those that are shared with the target are multiplied once."""
    first, second = "markov_head.markov_w1", "markov_head.markov_w2"
    if not config.markov_shared:
        return made.vector(f"{first}.weight").contiguous(), made.linear(second)
    embeddings = target.embedding_rows(torch.arange(config.vocab_size, device=target.device)).to(made.compute)
    rows = made.vector("lm_head.weight") if config.own_output_rows else target.output_rows(token_ids).to(made.compute)
    after = rows.to(made.device) @ made.vector(f"{second}.weight")
    return embeddings @ made.vector(f"{first}.weight").T, made.product([after])


@dataclass(frozen=True, slots=True, eq=False)
class BlockLayer:
    """One layer: norms as they are computed, and linear layers."""

    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor
    key_norm: Tensor
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear

    @classmethod
    def of(cls, made: HeadLayers, index: int, head_dim: int) -> BlockLayer:
        """Of a head's tensors. Queries and keys have the numbers that one rotation turns side by side."""
        place = f"layers.{index}"
        order = pair_halves(torch.arange(head_dim), head_dim)
        return cls(
            input_norm=made.vector(f"{place}.input_layernorm.weight"),
            qkv=made.linear(*(f"{place}.self_attn.{name}_proj" for name in "qkv"), rotated=2, head_dim=head_dim),
            query_norm=made.vector(f"{place}.self_attn.q_norm.weight")[order],
            key_norm=made.vector(f"{place}.self_attn.k_norm.weight")[order],
            out=made.linear(f"{place}.self_attn.o_proj"),
            mlp_norm=made.vector(f"{place}.post_attention_layernorm.weight"),
            gate_up=made.linear(f"{place}.mlp.gate_proj", f"{place}.mlp.up_proj"),
            down=made.linear(f"{place}.mlp.down_proj"),
        )


class BlockLayers(Protocol):
    """What computes the rows of a block head.

    Attributes:
        planner: of its attention.
    """

    planner: Planner

    def fuse(self, states: Tensor) -> Tensor:
        """As `FusingHeadModel.fuse`. states: [n, layers, hidden_size] in float32 or float64."""

    def context(self, batch: Sequence[Rows]) -> None:
        """Compute context rows of fused states, which join their caches' scratch."""

    def forward(self, batch: Sequence[Rows], x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute blocks, whose slots join their caches' scratch.

        Args:
            batch: of which the tokens are not read.
            x: [T, hidden_size] what stands in the slots; it may be overwritten.

        Returns:
            Of the wanted rows, [R, hidden_size] what the output layer reads, and [R, draft_vocab_size] logits without
            the Markov bias.
        """


class ReferenceBlockLayers:
    """`BlockLayers` in PyTorch, with linear layers of the target's kind.

    Args:
        made: makes the layers of the head's tensors.
        output: the output layer.
    """

    def __init__(self, made: HeadLayers, config: BlockConfig, output: Linear) -> None:
        self._config, self._made, self._output = config, made, output
        self._fuse = made.linear("fc")
        self._state_norms = [made.vector(f"{name}.weight") for name in state_norms(config)]
        self._context_norm = made.vector("hidden_norm.weight")
        places = [f"layers.{index}.self_attn" for index in range(config.num_layers)]
        keys, values = ([f"{place}.{name}_proj" for place in places] for name in "kv")
        # to the keys of all layers, then the values of all layers
        self._context = made.linear(*keys, *values, rotated=len(keys), head_dim=config.head_dim)
        self._layers = [BlockLayer.of(made, index, config.head_dim) for index in range(config.num_layers)]
        self._norm = made.vector("norm.weight")
        self._eps = torch.tensor(config.rms_norm_eps, dtype=made.compute, device=made.device)
        frequencies = inverse_frequencies(config.rope_theta, config.head_dim)
        self._rotation = Rotation(frequencies, 1.0, made.compute, made.device)
        self._form, layer = head_attention(config)
        self._attention = made.attention()
        self.planner: Planner = self._attention.planner([layer] * config.num_layers, made.device)

    def fuse(self, states: Tensor) -> Tensor:
        """As `BlockLayers.fuse`."""
        if self._state_norms:
            states = torch.stack([self._normed(states[:, i], norm) for i, norm in enumerate(self._state_norms)], 1)
        return self._made.multiply(self._fuse, states.flatten(1))

    def context(self, batch: Sequence[Rows]) -> None:
        """As `BlockLayers.context`."""
        config, caches = self._config, [_sequence_cache(rows.cache) for rows in batch]
        states = torch.cat([rows.states for rows in batch if rows.states is not None])
        firsts = [cache.num_scratch for cache in caches]
        positions: list[int] = []
        for cache, first, rows in zip(caches, firsts, batch, strict=True):
            count = len(rows.token_ids)
            cache.feed(range(first - 1, first + count - 1))
            positions += range(cache.length + first, cache.length + first + count)
        states = self._normed(states.to(self._made.device, self._made.compute), self._context_norm)
        heads = self._made.multiply(self._context, states)
        # [2, layers, heads, rows, head_dim]
        both = heads.view(len(states), 2, config.num_layers, config.num_kv_heads, config.head_dim).permute(
            1, 2, 3, 0, 4
        )
        turns = self._rotation.at(torch.tensor(positions, device=self._made.device))
        for index, layer in enumerate(self._layers):
            keys = self._normed(both[0, index].transpose(0, 1).contiguous(), layer.key_norm)
            rotate(keys, turns)
            keys, start = keys.transpose(0, 1), 0
            for cache, first, rows in zip(caches, firsts, batch, strict=True):
                part = slice(start, start + len(rows.token_ids))
                cache.write(index, first, keys[:, part], both[1, index][:, part])
                start = part.stop

    def forward(self, batch: Sequence[Rows], x: Tensor) -> tuple[Tensor, Tensor]:
        """As `BlockLayers.forward`."""
        layout = lay_out(batch, self.planner)
        x = torch.cat([x, x[-1:].expand(layout.num_rows - len(x), -1)])
        for index, layer in enumerate(self._layers):
            x = self._layer(index, layer, x, layout)
        output = self._normed(layout.select_logit_rows(x), self._norm)
        logits = self._made.multiply(self._output, output)
        return output[: layout.num_logits], logits[: layout.num_logits]

    def _layer(self, index: int, layer: BlockLayer, x: Tensor, layout: Layout) -> Tensor:
        multiply, config = self._made.multiply, self._config
        heads = multiply(layer.qkv, self._normed(x, layer.input_norm)).view(len(x), -1, config.head_dim)
        rotated = config.num_heads + config.num_kv_heads
        query = self._normed(heads[:, : config.num_heads], layer.query_norm)
        key = self._normed(heads[:, config.num_heads : rotated], layer.key_norm)
        turns = self._rotation.turns(layout)
        rotate(query, turns)
        rotate(key, turns)
        attended = self._attention.forward(index, query, key, heads[:, rotated:], layout, self._form)
        x = x + multiply(layer.out, attended)
        h = multiply(layer.gate_up, self._normed(x, layer.mlp_norm))
        wide = config.intermediate_size
        return x + multiply(layer.down, F.silu(h[:, :wide]).mul_(h[:, wide:]))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._eps)


def _sequence_cache(cache: Cache) -> SequenceCache:
    return cache_of(SequenceCache, cache)  # type: ignore[type-abstract]  # nothing is made of it
