"""The weights of an EAGLE head in the form in which they are multiplied, which is the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.config import REFERENCE
from forerun.heads.stored import StoredHead
from forerun.kernels.native.library import Library
from forerun.kernels.native_linear import NativeLinear
from forerun.kernels.quantise import quantise_int8
from forerun.kernels.quantised_weight import QuantisedWeight
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
    def of(cls, head: StoredHead, target: LanguageModel, token_ids: Tensor) -> LayerParts:
        """Of a head's tensors. token_ids: [draft_vocab_size], the target's tokens that it can propose."""
        config, made = head.config, _Made.of(head, target)
        layer = "layers.0" if config.version == 1 else "midlayer"
        mlp_norm = made.norm(f"{layer}.post_attention_layernorm")
        assert mlp_norm is not None
        norms = [made.norm(f"fc_norm.{i}") for i in range(len(config.layers))]
        own = config.own_output_rows
        return cls(
            compute_dtype=made.compute,
            product_dtype=made.takes,
            attention=made.attention(),
            fuse=made.linear("fc"),
            qkv=made.linear(*(f"{layer}.self_attn.{name}_proj" for name in "qkv"), paired=2),
            out=made.linear(f"{layer}.self_attn.o_proj"),
            gate_up=made.linear(f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"),
            down=made.linear(f"{layer}.mlp.down_proj"),
            head=made.linear("lm_head") if own else made.product([target.output_rows(token_ids)]),
            embedding_residual=made.linear("embedding_residual") if config.embedding_residual else None,
            mlp_norm=mlp_norm,
            input_norm=made.norm(f"{layer}.input_layernorm"),
            hidden_norm=made.norm(f"{layer}.hidden_norm"),
            norm=made.norm("norm"),
            state_norms=[each for each in norms if each is not None] if config.norm_before_fc else None,
            eps=torch.tensor(config.rms_norm_eps, dtype=made.compute, device=target.device),
        )

    def product(self, linear: Linear, x: Tensor) -> Tensor:
        """[n, in] -> [n, out] in `compute_dtype`, whatever the layer takes."""
        return linear.forward(x.to(self.product_dtype)).to(self.compute_dtype)


@dataclass(frozen=True, slots=True)
class _Made:
    """Makes the parts.

    Attributes:
        compute, takes: as `LayerParts.compute_dtype` and `product_dtype`.
        library: the native one, where the target is computed by it.
        quantises: numbers are brought to codes, as the target's are.
    """

    head: StoredHead
    device: torch.device
    dtype: torch.dtype
    compute: torch.dtype
    takes: torch.dtype
    library: Library | None
    quantises: bool

    @classmethod
    def of(cls, head: StoredHead, target: LanguageModel) -> _Made:
        device, dtype, quantises = target.device, target.dtype, target.quantize is not None
        library = None if target.kernels == REFERENCE else library_for(device, dtype, is_quantised=quantises)
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        takes = compute if library is not None or quantises else dtype
        return cls(head, device, dtype, compute, takes, library, quantises)

    def attention(self) -> Attention:
        """Of the target's kind."""
        return (
            ReferenceAttention(self.takes)
            if self.library is None
            else NativeAttention(self.library, self.takes, self.dtype)
        )

    def norm(self, name: str) -> Tensor | None:
        """The weights of a norm, if the head has it."""
        found = self.head.tensors.get(f"{name}.weight")
        return None if found is None else found.detach().to(self.device, self.compute)

    def linear(self, *names: str, paired: int = 0) -> Linear:
        """Of the matrices of these names; the heads of the first `paired` of them are to be rotated."""
        parts: list[Tensor | QuantisedWeight] = []
        for number, name in enumerate(f"{name}.weight" for name in names):
            numbers, codes = self.head.tensors[name], self.head.codes.get(name)
            order = torch.arange(len(numbers))
            order = pair_halves(order, self.head.config.head_dim) if number < paired else order
            parts.append(numbers[order] if codes is None else codes.rows(order))
        return self.product(parts)

    def product(self, parts: Sequence[Tensor | QuantisedWeight]) -> Linear:
        """One layer whose outputs are those of the parts, [out, in], one after another."""
        codes = [part.to(self.device) for part in parts if isinstance(part, QuantisedWeight)]
        if len(codes) == len(parts):
            return make_quantised_linear(codes)
        numbers = [part.dequantise(self.compute) if isinstance(part, QuantisedWeight) else part for part in parts]
        joined = torch.cat([part.to(self.device, self.compute) for part in numbers])
        if self.quantises:
            return make_quantised_linear([quantise_int8(joined, "a head")])
        joined = joined.to(self.dtype)
        return make_linear(joined) if self.library is None else NativeLinear(self.library, joined)
