"""The weights of a block head in the form in which they are multiplied, which is the target's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.heads.block_config import BlockConfig
from forerun.models.base import LanguageModel
from forerun.models.head_layers import HeadLayers
from forerun.models.linear import Linear
from forerun.models.rotation import pair_halves


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
