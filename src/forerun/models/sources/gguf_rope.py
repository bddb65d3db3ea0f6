"""Rotary embeddings of GGUF files in Transformers' terms."""

from __future__ import annotations

import math
from typing import Any

import torch

from forerun.gguf_format import GgufTensor
from forerun.models.sources.gguf_fields import ModelFields

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of all Llama 3 models with longer contexts; their factor differs."""
_CLOSE = 1e-5


def rope_parameters(fields: ModelFields, factors: GgufTensor | None, head_dim: int) -> dict[str, Any]:
    """`rope_parameters` of a Transformers configuration.

    Args:
        factors: the tensor `rope_freqs.weight`, by which the frequencies are divided.

    Raises:
        ModelLoadError: a value cannot be.
        UnsupportedModelError: the scaling is of another kind than linear, yarn, or by factors.
    """
    base = fields.number("rope.freq_base", 10000.0, low=1)
    scaled = _scaling(fields)
    if factors is None:
        return {"rope_theta": base, **scaled}
    if scaled["rope_type"] != "default":
        fields.refuse(f"its rotary embedding is scaled by {scaled['rope_type']} and by {factors.name} together")
    return {"rope_theta": base, **_by_factors(fields, factors, base, head_dim)}


def _scaling(fields: ModelFields) -> dict[str, Any]:
    kind = fields.string("rope.scaling.type", "linear")  # llama.cpp's default
    factor = fields.number("rope.scaling.factor", None)
    if factor is None:
        factor = fields.number("rope.scale_linear", 0.0)
    factor = factor or 1.0
    if kind == "none" or (kind == "linear" and factor == 1):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        fields.refuse(f"{fields.name('rope.scaling.type')} is {kind[:60]!r} and not none, linear or yarn")
    return _yarn(fields, factor)


def _yarn(fields: ModelFields, factor: float) -> dict[str, Any]:
    """llama.cpp multiplies the attention's factor with that of the paper, 0.1 ln(factor) + 1."""
    fields.refuse_other({"rope.scaling.yarn_ext_factor": (1,), "rope.scaling.yarn_log_multiplier": (0,)})
    attention = fields.number("rope.scaling.attn_factor", 1.0) * fields.number("rope.scaling.yarn_attn_factor", 1.0)
    context = fields.integer("context_length", low=1)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "attention_factor": attention * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
        "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0),
        "original_max_position_embeddings": fields.integer("rope.scaling.original_context_length", context, low=1),
    }


def _by_factors(fields: ModelFields, tensor: GgufTensor, base: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's parameters if they give these factors, else the factors themselves: Transformers calls a scaling by
    given factors "longrope"; with the same ones for short and long contexts it does not depend on the length."""
    factors = tensor.dequantise(torch.float32)
    if factors.shape != (head_dim // 2,) or not bool((torch.isfinite(factors) & (factors > 0)).all()):
        fields.refuse(
            f"{tensor.name}, of the shape {list(tensor.shape)}, does not hold {head_dim // 2} positive factors"
        )
    if bool((factors == 1).all()):
        return {"rope_type": "default"}
    largest = float(factors.max())
    llama3 = {"rope_type": "llama3", "factor": largest, **_LLAMA3}
    if largest >= 1 and torch.allclose(factors, llama3_factors(llama3, base, head_dim), rtol=_CLOSE, atol=0):
        return llama3
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "short_factor": factors.tolist(),
        "long_factor": factors.tolist(),
        "original_max_position_embeddings": fields.integer("context_length", low=1),
    }


def llama3_factors(parameters: dict[str, Any], base: float, head_dim: int) -> torch.Tensor:
    """By what Transformers divides the frequencies with these parameters, [head_dim / 2]."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        rope_parameters={"rope_theta": base, **parameters},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    plain = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    factors: torch.Tensor = plain / scaled
    return factors
