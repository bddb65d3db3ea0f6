"""The weights of a block head in the form in which they are multiplied, which is the target's."""

from __future__ import annotations

from collections.abc import Callable
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
        compute_dtype: of everything between the products: float64 for a float64 target, else float32.
        product_dtype: what the linear layers take.
        fuse: states to hidden_size.
        state_norms: one for each of the target's layers; None without.
        context_norm: of the fused states.
        context: from these to the keys of all layers, then the values of all layers.
        mask: [hidden] what stands in the slots after the first.
        before: [vocab_size, rank] W1, and `after` W2, of the Markov bias; None without.
        confidence: weight [width] and bias of the estimate; None without.
        eps: of all norms.
    """

    compute_dtype: torch.dtype
    product_dtype: torch.dtype
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

        def numbers(name: str) -> Tensor:
            return head.tensors[name].detach().to(target.device, made.compute)

        mask = None if config.mask_token_id is None else target.embedding_rows(torch.tensor([config.mask_token_id]))[0]
        markov = "markov_head.markov_w" if config.markov_rank else None
        sure = "confidence_head.proj" if config.confidence else None
        return cls(
            compute_dtype=made.compute,
            product_dtype=made.takes,
            attention=made.attention(),
            fuse=made.linear("fc"),
            state_norms=[numbers(f"fc_norm.{i}.weight") for i in range(len(config.layers))]
            if config.norm_before_fc
            else None,
            context_norm=numbers("hidden_norm.weight"),
            context=made.linear(*keys, *values, rotated=len(keys), head_dim=config.head_dim),
            layers=[_layer(made, numbers, index, config.head_dim) for index in range(config.num_layers)],
            norm=numbers("norm.weight"),
            head=made.linear("lm_head") if config.own_output_rows else made.product([target.output_rows(token_ids)]),
            mask=numbers("mask_embedding.weight") if mask is None else mask.to(target.device, made.compute),
            before=numbers(f"{markov}1.weight") if markov else None,
            after=made.linear(f"{markov}2") if markov else None,
            confidence=(numbers(f"{sure}.weight")[0], numbers(f"{sure}.bias")[0]) if sure else None,
            eps=torch.tensor(config.rms_norm_eps, dtype=made.compute, device=target.device),
        )

    def product(self, linear: Linear, x: Tensor) -> Tensor:
        """[n, in] -> [n, out] in `compute_dtype`, whatever the layer takes."""
        return linear.forward(x.to(self.product_dtype)).to(self.compute_dtype)


def _layer(made: HeadLayers, numbers: Callable[[str], Tensor], index: int, head_dim: int) -> BlockLayer:
    place = f"layers.{index}"
    order = pair_halves(torch.arange(head_dim), head_dim)
    return BlockLayer(
        input_norm=numbers(f"{place}.input_layernorm.weight"),
        qkv=made.linear(*(f"{place}.self_attn.{name}_proj" for name in "qkv"), rotated=2, head_dim=head_dim),
        query_norm=numbers(f"{place}.self_attn.q_norm.weight")[order],
        key_norm=numbers(f"{place}.self_attn.k_norm.weight")[order],
        out=made.linear(f"{place}.self_attn.o_proj"),
        mlp_norm=numbers(f"{place}.post_attention_layernorm.weight"),
        gate_up=made.linear(f"{place}.mlp.gate_proj", f"{place}.mlp.up_proj"),
        down=made.linear(f"{place}.mlp.down_proj"),
    )
