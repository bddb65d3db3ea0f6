"""Rotary embeddings of GGUF files in Transformers' terms."""

from __future__ import annotations

import math
from typing import Any

import torch

from forerun.errors import UnsupportedModelError
from forerun.files.json_file import Fields
from forerun.gguf_format import GgufTensor

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of all Llama 3 models with longer contexts; their factor differs."""
_CLOSE = 1e-5
_LLAMA_CPP = "Serve it with llama.cpp."


def rope_parameters(fields: Fields, architecture: str, factors: GgufTensor | None, head_dim: int) -> dict[str, Any]:
    """`rope_parameters` of a Transformers configuration.

    Args:
        fields: the file's metadata.
        factors: the tensor `rope_freqs.weight`, by which the frequencies are divided.

    Raises:
        ModelLoadError: a value cannot be.
        UnsupportedModelError: the scaling is of another kind than linear, yarn, or by factors.
    """
    base = fields.number(f"{architecture}.rope.freq_base", 10000.0, low=1.0)
    scaled = _scaling(fields, architecture)
    if factors is None:
        return {"rope_theta": base, **scaled}
    if scaled["rope_type"] != "default":
        raise UnsupportedModelError(
            f"{fields.place}: its rotary embedding is scaled by {scaled['rope_type']} and by {factors.name}, which "
            f"forerun does not do together. {_LLAMA_CPP}"
        )
    return {"rope_theta": base, **_by_factors(fields, architecture, factors, base, head_dim)}


def _scaling(fields: Fields, architecture: str) -> dict[str, Any]:
    prefix = f"{architecture}.rope.scaling."
    kind = fields.string(f"{prefix}type", "linear")  # llama.cpp's default
    factor = fields.number(f"{prefix}factor", None, low=0)
    if factor is None:
        factor = fields.number(f"{architecture}.rope.scale_linear", 0.0, low=0)
    factor = factor or 1.0
    if kind == "none" or (kind == "linear" and factor == 1):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModelError(
            f"{fields.place}: {prefix}type is {kind!r}, and forerun reads none, linear and yarn. {_LLAMA_CPP}"
        )
    return _yarn(fields, architecture, factor)


def _yarn(fields: Fields, architecture: str, factor: float) -> dict[str, Any]:
    """llama.cpp multiplies the attention's factor with that of the paper, 0.1 ln(factor) + 1."""
    prefix = f"{architecture}.rope.scaling."
    for key, neutral in ((f"{prefix}yarn_ext_factor", 1.0), (f"{prefix}yarn_log_multiplier", 0.0)):
        if fields.number(key, neutral) != neutral:
            raise UnsupportedModelError(
                f"{fields.place}: {key} is {fields.number(key)}, which is not computed. {_LLAMA_CPP}"
            )
    attention = 1.0
    for key in (f"{prefix}attn_factor", f"{prefix}yarn_attn_factor"):
        attention *= fields.number(key, 1.0)
    context = fields.integer(f"{architecture}.context_length", low=1)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "attention_factor": attention * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
        "beta_fast": fields.number(f"{prefix}yarn_beta_fast", 32.0),
        "beta_slow": fields.number(f"{prefix}yarn_beta_slow", 1.0),
        "original_max_position_embeddings": fields.integer(f"{prefix}original_context_length", context, low=1),
    }


def _by_factors(fields: Fields, architecture: str, tensor: GgufTensor, base: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's parameters if they give these factors, else the factors themselves: Transformers calls a scaling by
    given factors "longrope"; with the same ones for short and long contexts it does not depend on the length."""
    factors = tensor.dequantise(torch.float32)
    if factors.shape != (head_dim // 2,) or not bool((torch.isfinite(factors) & (factors > 0)).all()):
        raise UnsupportedModelError(
            f"{fields.place}: {tensor.name} has the shape {list(tensor.shape)}, but must hold {head_dim // 2} positive "
            f"factors. {_LLAMA_CPP}"
        )
    largest = float(factors.max())
    if bool((factors == 1).all()):
        return {"rope_type": "default"}
    llama3 = {"rope_type": "llama3", "factor": largest, **_LLAMA3}
    if largest >= 1 and torch.allclose(factors, _llama3_factors(llama3, base, head_dim), rtol=_CLOSE, atol=0):
        return llama3
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "short_factor": factors.tolist(),
        "long_factor": factors.tolist(),
        "original_max_position_embeddings": fields.integer(f"{architecture}.context_length", low=1),
    }


def _llama3_factors(parameters: dict[str, Any], base: float, head_dim: int) -> torch.Tensor:
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
    return plain / scaled
