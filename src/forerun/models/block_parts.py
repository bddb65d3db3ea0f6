"""The weights of a block head in the form in which they are multiplied, which is the target's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.heads.block_config import BlockConfig
from forerun.heads.stored import StoredHead
from forerun.models.attention.base import Attention
from forerun.models.base import LanguageModel
from forerun.models.head_layers import HeadLayers
from forerun.models.linear import Linear
from forerun.models.rotation import pair_halves


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


@dataclass(frozen=True, slots=True, eq=False)
class BlockParts:
    """All of a head.

    Attributes:
        made: what has made the layers, and multiplies by them.
        fuse: states to hidden_size.
        state_norms: one for each of the target's layers; None without.
        context_norm: of the fused states.
        context: from these to the keys of all layers, then the values of all layers.
        mask: [hidden] what stands in the slots after the first.
        before: [vocab_size, rank] W1, and `after` W2, of the Markov bias; None without.
        confidence: weight [width] and bias of the estimate; None without.
        eps: of all norms.
    """

    made: HeadLayers
    attention: Attention
    fuse: Linear
    state_norms: list[Tensor] | None
    context_norm: Tensor
    context: Linear
    layers: list[BlockLayer]
    norm: Tensor
    head: Linear
    mask: Tensor
    before: Tensor | None
    after: Linear | None
    confidence: tuple[Tensor, Tensor] | None
    eps: Tensor

    @classmethod
    def of(cls, head: StoredHead[BlockConfig], target: LanguageModel, token_ids: Tensor) -> BlockParts:
        """Of a head's tensors. token_ids: [draft_vocab_size], the target's tokens that it can propose."""
        config, made = head.config, HeadLayers.of(head, target)
        places = [f"layers.{index}.self_attn" for index in range(config.num_layers)]
        keys, values = ([f"{place}.{name}_proj" for place in places] for name in "kv")
        mask = None if config.mask_token_id is None else target.embedding_rows(torch.tensor([config.mask_token_id]))[0]
        markov = "markov_head.markov_w" if config.markov_rank else None
        sure = "confidence_head.proj" if config.confidence else None
        return cls(
            made=made,
            attention=made.attention(),
            fuse=made.linear("fc"),
            state_norms=[made.vector(f"fc_norm.{i}.weight") for i in range(len(config.layers))]
            if config.norm_before_fc
            else None,
            context_norm=made.vector("hidden_norm.weight"),
            context=made.linear(*keys, *values, rotated=len(keys), head_dim=config.head_dim),
            layers=[_layer(made, index, config.head_dim) for index in range(config.num_layers)],
            norm=made.vector("norm.weight"),
            head=made.output(config.own_output_rows, target, token_ids),
            mask=made.vector("mask_embedding.weight") if mask is None else mask.to(target.device, made.compute),
            before=made.vector(f"{markov}1.weight") if markov else None,
            after=made.linear(f"{markov}2") if markov else None,
            confidence=(made.vector(f"{sure}.weight")[0], made.vector(f"{sure}.bias")[0]) if sure else None,
            eps=torch.tensor(config.rms_norm_eps, dtype=made.compute, device=target.device),
        )


def _layer(made: HeadLayers, index: int, head_dim: int) -> BlockLayer:
    place = f"layers.{index}"
    order = pair_halves(torch.arange(head_dim), head_dim)
    return BlockLayer(
        input_norm=made.vector(f"{place}.input_layernorm.weight"),
        qkv=made.linear(*(f"{place}.self_attn.{name}_proj" for name in "qkv"), rotated=2, head_dim=head_dim),
        query_norm=made.vector(f"{place}.self_attn.q_norm.weight")[order],
        key_norm=made.vector(f"{place}.self_attn.k_norm.weight")[order],
        out=made.linear(f"{place}.self_attn.o_proj"),
        mlp_norm=made.vector(f"{place}.post_attention_layernorm.weight"),
        gate_up=made.linear(f"{place}.mlp.gate_proj", f"{place}.mlp.up_proj"),
        down=made.linear(f"{place}.mlp.down_proj"),
    )
