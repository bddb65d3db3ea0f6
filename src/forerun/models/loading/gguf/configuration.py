"""Converts the metadata of a GGUF file to a Transformers configuration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.models.loading.configuration import PlainConfig, check_values
from forerun.models.loading.gguf.file import GgufFile
from forerun.models.loading.gguf.header import REMEDY, brief
from forerun.models.loading.gguf.tensor_names import EMBEDDING, ROPE_FACTORS, ModelFields, is_tied, metadata_of
from forerun.models.loading.gguf.tensors import GgufTensor
from forerun.utils.foreign_errors import as_load_errors
from forerun.utils.json_file import Fields

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of all Llama 3 models with longer contexts; their factor differs."""
_CLOSE = 1e-5


def rope_parameters(fields: ModelFields, factors: GgufTensor | None, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` of a Transformers configuration.

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
    """Return the parameters of a YaRN scaling. llama.cpp multiplies the attention factor with that of the paper, 0.1
    ln(factor) + 1."""
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
    """Return Llama 3's parameters if they give these factors, else the factors themselves. Transformers calls a scaling
    by given factors "longrope"; with the same factors for short and long contexts it does not depend on the length."""
    factors = tensor.dequantize(torch.float32)
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
    """Return the factors by which Transformers divides the frequencies with these parameters, [head_dim / 2]."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = PlainConfig(head_dim=head_dim, rope_parameters={"rope_theta": base, **parameters})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    plain = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    factors: torch.Tensor = plain / scaled
    return factors


ARCHITECTURES = ("llama", "qwen2", "qwen3")
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "attention.causal": (True,),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.dimension_sections": (),
}
"""Keys that stand for other computations than these architectures', and the values that do not."""


def read_gguf_config(file: GgufFile, eos_ids: Iterable[int]) -> dict[str, Any]:
    """Return the configuration of the file's model by Transformers' keys, "model_type" among them.

    Args:
        eos_ids: the tokens that end an output.

    Raises:
        ModelLoadError: a key is missing, or its value cannot be.
        UnsupportedModelError: another architecture, or something in it that Transformers' model does not compute.
    """
    fields = _model_fields(file)
    if EMBEDDING not in file.tensors:
        raise ModelLoadError(f"{file.path}: it has no tensor {EMBEDDING}, and so no model. {REMEDY}")
    hidden = fields.integer("embedding_length", low=1)
    heads = fields.of_all_layers("attention.head_count")
    head_dim = _head_dim(fields, hidden, heads)
    values = {
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "intermediate_size": fields.of_all_layers("feed_forward_length"),
        "num_hidden_layers": _num_layers(fields, file),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.of_all_layers("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length", low=1),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(fields, file.tensors.get(ROPE_FACTORS), head_dim),
        "tie_word_embeddings": is_tied(file),
        "bos_token_id": fields.fields.integer("tokenizer.ggml.bos_token_id", None, low=0),
        "eos_token_id": sorted(eos_ids) or None,
    }
    model_type, more = _model_type(fields, file)
    values |= {"model_type": model_type, **more}
    check_values(Fields.of(values, f"{file.path}: its metadata", ModelLoadError, remedy=REMEDY))
    return values


def transformers_config(config: PlainConfig, place: str) -> Any:
    """Return the configuration as Transformers' class of its type. place: the file, for messages.

    Raises:
        ModelLoadError: it describes no such model.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with as_load_errors(f"{place}: its metadata describes no {config.model_type} model", REMEDY):
        return CONFIG_MAPPING[config.model_type].from_dict(dict(vars(config)))


def _model_fields(file: GgufFile) -> ModelFields:
    fields = metadata_of(file)
    kind = fields.string("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"{fields.place}: it holds no model: general.type is {brief(kind)}. Give a model.")
    architecture = fields.string("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{fields.place}: it is of the architecture {brief(architecture)}, and of GGUF files forerun reads "
            f"{', '.join(ARCHITECTURES)} (Mistral's say llama). Give the model's Transformers folder or hub id instead."
        )
    found = ModelFields(fields, architecture)
    found.refuse_other(_NEUTRAL)
    return found


def _num_layers(fields: ModelFields, file: GgufFile) -> int:
    """Return the number of layers, at most the number of tensors: configurations make lists of this length."""
    count = fields.integer("block_count", low=1)
    if count > len(file.tensors):
        raise ModelLoadError(
            f"the metadata of {file.path} speaks of {count} layers, and it has {len(file.tensors)} tensors. {REMEDY}"
        )
    return count


def _head_dim(fields: ModelFields, hidden: int, heads: int) -> int:
    """Return the width of a head. Keys and values must have this width, and be rotated as a whole."""
    width = fields.integer("attention.key_length", None, low=1)
    if width is None:
        if hidden % heads:
            raise fields.fields.wrong(fields.name("embedding_length"), f"a multiple of the {heads} heads")
        width = hidden // heads
    if width % 2:
        fields.refuse(f"its heads are {width} wide, an odd number")
    for key in ("attention.value_length", "rope.dimension_count"):
        other = fields.integer(key, width)
        if other != width:
            fields.refuse(f"{fields.name(key)} is {other} and the heads are {width} wide")
    return width


def _vocab_size(file: GgufFile) -> int:
    """Return the size of the token list; without one, the rows of the embedding."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else file.tensors[EMBEDDING].shape[0]


def _model_type(fields: ModelFields, file: GgufFile) -> tuple[str, dict[str, Any]]:
    """Return Transformers' model type, and the options of this type alone."""
    architecture, has_biases = fields.architecture, "blk.0.attn_q.bias" in file.tensors
    window = fields.integer("attention.sliding_window", 0)
    if 0 < window < fields.integer("context_length", low=1):
        if architecture != "llama" or "attention.sliding_window_pattern" in fields:
            fields.refuse(f"it has a sliding window of {window} positions and does not say in which layers")
        return "mistral", {"sliding_window": window}
    if architecture == "llama":
        return "llama", {"attention_bias": has_biases, "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors}
    return architecture, {"attention_bias": has_biases} if architecture == "qwen3" else {}
