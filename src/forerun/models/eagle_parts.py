"""The weights of an EAGLE head in the form in which they are multiplied, which is the target's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.config import REFERENCE
from forerun.heads.eagle_config import EagleConfig
from forerun.kernels.native_linear import NativeLinear
from forerun.kernels.quantise import quantise_int8
from forerun.models.attention.base import Attention
from forerun.models.attention.native import NativeAttention
from forerun.models.attention.reference import ReferenceAttention
from forerun.models.base import LanguageModel
from forerun.models.decoders import library_for
from forerun.models.linear import Linear, make_linear, make_quantised_linear
from forerun.models.rotation import pair_halves


@dataclass(slots=True, eq=False)
class LayerParts:
    """Norms in the type they are computed in, and linear layers; None where the head has none.

    Attributes:
        compute_dtype: of everything between the products: float64 for a float64 target, else float32.
        product_dtype: what the linear layers take.
        fuse: states, or (version 1) embedding and state, to hidden_size.
        state_norms: one for each of the target's layers.
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
    eps: Tensor

    @classmethod
    def of(
        cls, config: EagleConfig, tensors: Mapping[str, Tensor], target: LanguageModel, token_ids: Tensor
    ) -> LayerParts:
        """Of a head's tensors. token_ids: [draft_vocab_size], the target's tokens that it can propose."""
        device, dtype = target.device, target.dtype
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        is_quantised = target.quantize is not None
        library = None if target.kernels == REFERENCE else library_for(device, dtype, is_quantised=is_quantised)
        takes = compute if library is not None or is_quantised else dtype

        def linear(*weights: Tensor) -> Linear:
            joined = torch.cat([weight.to(device, compute) for weight in weights])
            if is_quantised:
                return make_quantised_linear([quantise_int8(joined, "head")])
            joined = joined.to(dtype)
            return make_linear(joined) if library is None else NativeLinear(library, joined)

        def norm(name: str) -> Tensor | None:
            found = tensors.get(f"{name}.weight")
            return None if found is None else found.detach().to(device, compute)

        layer = "layers.0" if config.version == 1 else "midlayer"
        weight = {key.removeprefix(f"{layer}.").removesuffix(".weight"): each for key, each in tensors.items()}
        query, key = (pair_halves(weight[f"self_attn.{name}_proj"], config.head_dim) for name in "qk")
        mlp_norm = norm(f"{layer}.post_attention_layernorm")
        assert mlp_norm is not None
        norms = [norm(f"fc_norm.{i}") for i in range(len(config.layers))] if config.norm_before_fc else None
        return cls(
            compute_dtype=compute,
            product_dtype=takes,
            attention=ReferenceAttention(takes) if library is None else NativeAttention(library, takes, dtype),
            fuse=linear(weight["fc"]),
            qkv=linear(query, key, weight["self_attn.v_proj"]),
            out=linear(weight["self_attn.o_proj"]),
            gate_up=linear(weight["mlp.gate_proj"], weight["mlp.up_proj"]),
            down=linear(weight["mlp.down_proj"]),
            head=linear(weight["lm_head"] if config.own_output_rows else target.output_rows(token_ids)),
            embedding_residual=linear(weight["embedding_residual"]) if config.embedding_residual else None,
            mlp_norm=mlp_norm,
            input_norm=norm(f"{layer}.input_layernorm"),
            hidden_norm=norm(f"{layer}.hidden_norm"),
            norm=norm("norm"),
            state_norms=None if norms is None else [each for each in norms if each is not None],
            eps=torch.tensor(config.rms_norm_eps, dtype=compute, device=device),
        )

    def product(self, linear: Linear, x: Tensor) -> Tensor:
        """[n, in] -> [n, out] in `compute_dtype`, whatever the layer takes."""
        return linear.forward(x.to(self.product_dtype)).to(self.compute_dtype)
