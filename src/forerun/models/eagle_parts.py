"""The weights of an EAGLE head in the form in which they are multiplied, which is the target's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.heads.eagle_config import EagleConfig
from forerun.heads.stored import StoredHead
from forerun.models.attention.base import Attention
from forerun.models.base import LanguageModel
from forerun.models.head_layers import HeadLayers
from forerun.models.linear import Linear


@dataclass(slots=True, eq=False)
class LayerParts:
    """Norms in the type they are computed in, and linear layers; None where the head has none.

    Attributes:
        compute_dtype: of everything between the products: float64 for a float64 target, else float32.
        product_dtype: what the linear layers take.
        fuse: states, or (version 1) embedding and state, to hidden_size.
        state_norms: one for each of the target's layers.
        entry_norms: of embedding and state, before an MTP layer fuses them.
        norm: before the output layer.
        eps: of all norms.
    """

    compute_dtype: torch.dtype
    product_dtype: torch.dtype
    attention: Attention
    fuse: Linear
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    head: Linear
    embedding_residual: Linear | None
    mlp_norm: Tensor
    input_norm: Tensor | None
    hidden_norm: Tensor | None
    norm: Tensor | None
    state_norms: list[Tensor] | None
    entry_norms: list[Tensor] | None
    eps: Tensor

    @classmethod
    def of(cls, head: StoredHead[EagleConfig], target: LanguageModel, token_ids: Tensor) -> LayerParts:
        """Of a head's tensors. token_ids: [draft_vocab_size], the target's tokens that it can propose."""
        config, made = head.config, HeadLayers.of(head, target)
        layer = "layers.0" if config.version == 1 else "midlayer"
        mlp_norm = made.norm(f"{layer}.post_attention_layernorm")
        assert mlp_norm is not None
        norms = [made.norm(f"fc_norm.{i}") for i in range(len(config.layers))]
        entry = [each for each in (made.norm("enorm"), made.norm("hnorm")) if each is not None]
        own = config.own_output_rows
        return cls(
            compute_dtype=made.compute,
            product_dtype=made.takes,
            attention=made.attention(),
            fuse=made.linear("fc"),
            qkv=made.linear(*(f"{layer}.self_attn.{name}_proj" for name in "qkv"), rotated=2, head_dim=config.head_dim),
            out=made.linear(f"{layer}.self_attn.o_proj"),
            gate_up=made.linear(f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"),
            down=made.linear(f"{layer}.mlp.down_proj"),
            head=made.linear("lm_head") if own else made.product([target.output_rows(token_ids)]),
            embedding_residual=made.linear("embedding_residual") if config.embedding_residual else None,
            mlp_norm=mlp_norm,
            input_norm=made.norm(f"{layer}.input_layernorm"),
            hidden_norm=made.norm(f"{layer}.hidden_norm"),
            norm=made.norm("norm"),
            entry_norms=entry or None,
            state_norms=[each for each in norms if each is not None] if config.norm_before_fc else None,
            eps=torch.tensor(config.rms_norm_eps, dtype=made.compute, device=target.device),
        )

    def product(self, linear: Linear, x: Tensor) -> Tensor:
        """[n, in] -> [n, out] in `compute_dtype`, whatever the layer takes."""
        return linear.forward(x.to(self.product_dtype)).to(self.compute_dtype)
