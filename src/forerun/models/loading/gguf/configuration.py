"""Converts the metadata of a GGUF file to a Transformers configuration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.models.loading.configuration import PlainConfig, check_values
from forerun.models.loading.gguf.file import GgufFile
from forerun.models.loading.gguf.header import REMEDY, brief
from forerun.models.loading.gguf.tensors import GgufTensor
from forerun.utils.foreign_errors import as_load_errors
from forerun.utils.json_file import Fields

EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_SECTIONS, _TEMPERATURE = "rope.dimension_sections", "attention.temperature_scale"


class Architecture(NamedTuple):
    """What a GGUF file of an architecture is in Transformers.

    Attributes:
        model_type: Transformers' name.
        is_permuted: llama.cpp's converter permutes rows of queries and keys: there, one rotation turns rows that lie
            side by side, and in Transformers rows that lie half a head apart.
        biases: option of the configuration -> the tensor whose presence sets it.
        windowed: the model type whose layers all have the file's sliding window; None: windows are refused.
        reads: keys among _NEUTRAL that may have any value.
    """

    model_type: str
    is_permuted: bool = False
    biases: Mapping[str, str] = MappingProxyType({})
    windowed: str | None = None
    reads: tuple[str, ...] = ()


_ATTENTION_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
ARCHITECTURES = {
    "llama": Architecture("llama", True, {**_ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_gate.bias"}, windowed="mistral"),
    "mistral3": Architecture("mistral", True, windowed="mistral", reads=(_TEMPERATURE,)),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", biases=_ATTENTION_BIAS),
    # In a text, the positions of all sections of the multimodal rotation are the same, so it is the plain one.
    "qwen2vl": Architecture("qwen2", reads=(_SECTIONS,)),
    "qwen3vl": Architecture("qwen3", biases=_ATTENTION_BIAS, reads=(_SECTIONS,)),
}
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
    "rope.scaling.yarn_ext_factor": (1,),
    _SECTIONS: (),
    _TEMPERATURE: (0,),
}
"""Keys that stand for other computations than these architectures', and the values that do not."""


def architecture_of(file: GgufFile) -> str:
    """Return the name of the file's architecture, one of ARCHITECTURES.

    Raises:
        ModelLoadError: the metadata lacks it.
        UnsupportedModelError: it is another one, or the file holds no model.
    """
    kind, name = file.fields.string("general.type", "model"), file.fields.string("general.architecture")
    if kind != "model":
        raise UnsupportedModelError(f"{file.path}: it holds no model: general.type is {brief(kind)}. Give a model.")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: it is of the architecture {brief(name)}, and of GGUF files forerun reads "
            f"{', '.join(ARCHITECTURES)} (Mistral's say llama). Give the model's Transformers folder or hub id instead."
        )
    return name


def _keys_of(file: GgufFile, name: str) -> Fields:
    """Return the keys "ARCHITECTURE.KEY" by KEY. Numbers are the shortest decimals that float32 rounds to the stored
    ones, as the model's configuration had them; counts that are the same for every layer are given once."""
    values = {key: value for key, value in file.metadata.items() if key.startswith(f"{name}.")}
    for key, value in values.items():
        if isinstance(value, list) and len({*value}) == 1:
            value = value[0]
        if isinstance(value, float) and float(np.float32(value)) == value:
            value = float(str(np.float32(value)))
        values[key] = value
    place = f"{file.path}: of its keys {name}.*"
    return Fields(place, {key.removeprefix(f"{name}."): values[key] for key in values}, ModelLoadError, REMEDY)


def _refuse(fields: Fields, what: str) -> NoReturn:
    """Raise UnsupportedModelError for a valid value that no Transformers model of the architecture computes."""
    raise UnsupportedModelError(
        f"{fields.place}: {what}, which Transformers' model does not compute. Serve it with llama.cpp, or give the "
        "model's Transformers folder or hub id."
    )


def read_gguf_config(file: GgufFile, eos_ids: Iterable[int]) -> dict[str, Any]:
    """Return the configuration of the file's model by Transformers' keys, "model_type" among them.

    Args:
        eos_ids: the tokens that end an output.

    Raises:
        ModelLoadError: a key is missing, or its value cannot be.
        UnsupportedModelError: another architecture, or something in it that Transformers' model does not compute.
    """
    name = architecture_of(file)
    fields, architecture = _keys_of(file, name), ARCHITECTURES[name]
    for key, neutral in _NEUTRAL.items():
        value: Any = fields.values.get(key)
        if value is not None and value not in neutral and key not in architecture.reads:
            _refuse(fields, f"{key} is {value!r:.60}")
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(fields.values.get(key), list):
            _refuse(fields, f"{key} differs from layer to layer")
    if EMBEDDING not in file.tensors:
        raise ModelLoadError(f"{file.path}: it has no tensor {EMBEDDING}, and so no model. {REMEDY}")
    num_layers, heads = (fields.integer(key, low=1) for key in ("block_count", "attention.head_count"))
    if num_layers > len(file.tensors):  # configurations make lists of this length
        raise ModelLoadError(
            f"the metadata of {file.path} speaks of {num_layers} layers, and it has {len(file.tensors)} tensors. "
            f"{REMEDY}"
        )
    head_dim = _head_dim(fields, heads)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    values = {
        "vocab_size": len(tokens) if isinstance(tokens, list) else file.tensors[EMBEDDING].shape[0],
        "hidden_size": fields.integer("embedding_length", low=1),
        "intermediate_size": fields.integer("feed_forward_length", low=1),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads, low=1),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length", low=1),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", low=0),
        "rope_parameters": rope_parameters(fields, file.tensors.get(ROPE_FACTORS), head_dim),
        "tie_word_embeddings": HEAD not in file.tensors,  # the embedding, stored once, is the output layer as well
        "bos_token_id": file.fields.integer("tokenizer.ggml.bos_token_id", None, low=0),
        "eos_token_id": sorted(eos_ids) or None,
        "model_type": architecture.model_type,
        **_options(fields, architecture, file),
    }
    check_values(Fields.of(values, f"{file.path}: its metadata", ModelLoadError, remedy=REMEDY))
    return values


def _options(fields: Fields, architecture: Architecture, file: GgufFile) -> dict[str, Any]:
    """Return the options of the model's type alone, and the type where they decide it."""
    window = fields.integer("attention.sliding_window", 0, low=0)
    if 0 < window < fields.integer("context_length", low=1):
        if architecture.windowed is None or "attention.sliding_window_pattern" in fields:
            _refuse(fields, f"it has a sliding window of {window} positions and does not say in which layers")
        return {"model_type": architecture.windowed, "sliding_window": window}
    if fields.values.get(_TEMPERATURE):
        return {"model_type": "ministral3"}
    return {option: tensor in file.tensors for option, tensor in architecture.biases.items()}


def transformers_config(config: PlainConfig, place: str) -> Any:
    """Return the configuration as Transformers' class of its type. place: the file, for messages.

    Raises:
        ModelLoadError: it describes no such model.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with as_load_errors(f"{place}: its metadata describes no {config.model_type} model", REMEDY):
        return CONFIG_MAPPING[config.model_type].from_dict(dict(vars(config)))


def _head_dim(fields: Fields, heads: int) -> int:
    """Return the width of a head. Keys and values must have this width, and be rotated as a whole."""
    hidden = fields.integer("embedding_length", low=1)
    width = fields.integer("attention.key_length", None, low=1)
    if width is None and hidden % heads:
        raise fields.wrong("embedding_length", f"a multiple of the {heads} heads")
    width = width or hidden // heads
    if width % 2:
        _refuse(fields, f"its heads are {width} wide, an odd number")
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := fields.integer(key, width, low=0)) != width:
            _refuse(fields, f"{key} is {other} and the heads are {width} wide")
    return width


# of all Llama 3 models with longer contexts; their factor differs
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_parameters(fields: Fields, factors: GgufTensor | None, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` of a Transformers configuration.

    Args:
        factors: the tensor `rope_freqs.weight`, by which the frequencies are divided.

    Raises:
        ModelLoadError: a value cannot be.
        UnsupportedModelError: the scaling is of another kind than linear, yarn, or by factors.
    """
    base = fields.number("rope.freq_base", 10000.0, low=1)
    kind = fields.string("rope.scaling.type", "linear")  # llama.cpp's default
    factor = fields.number("rope.scaling.factor", 0.0, low=0) or fields.number("rope.scale_linear", 0.0, low=0) or 1.0
    if kind not in ("none", "linear", "yarn"):
        _refuse(fields, f"rope.scaling.type is {kind[:60]!r} and not none, linear or yarn")
    is_default = kind == "none" or (kind == "linear" and factor == 1)
    scaled: dict[str, Any] = {"rope_type": "default"} if is_default else {"rope_type": kind, "factor": factor}
    context = fields.integer("rope.scaling.original_context_length", fields.integer("context_length", low=1), low=1)
    if kind == "yarn":
        scaled |= {**_yarn(fields, factor), "original_max_position_embeddings": context}
    if temperature := fields.number(_TEMPERATURE, 0.0, low=0):  # by which queries grow with every such length
        scaled |= {"llama_4_scaling_beta": temperature, "original_max_position_embeddings": context}
    if factors is not None:
        if not is_default:
            _refuse(fields, f"its rotary embedding is scaled by {kind} and by {factors.name} together")
        scaled = _by_factors(fields, factors, base, head_dim)
    return {"rope_theta": base, **scaled}


def _yarn(fields: Fields, factor: float) -> dict[str, Any]:
    """Return the parameters of a YaRN scaling. llama.cpp multiplies the file's attention factor with that of the paper,
    0.1 ln(factor) + 1, and divides by the same with the logarithm multiplied (Transformers' `mscale_all_dim`)."""
    attention = fields.number("rope.scaling.attn_factor", 1.0, low=0) * fields.number(
        "rope.scaling.yarn_attn_factor", 1.0, low=0
    )
    growth, multiplier = 0.1 * math.log(max(factor, 1.0)), fields.number("rope.scaling.yarn_log_multiplier", 0.0, low=0)
    return {
        "attention_factor": attention * (growth + 1.0) / (growth * multiplier + 1.0),
        "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0, low=0),
        "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0, low=0),
    }


def _by_factors(fields: Fields, tensor: GgufTensor, base: float, head_dim: int) -> dict[str, Any]:
    """Return Llama 3's parameters if they give these factors, else the factors themselves. Transformers calls a scaling
    by given factors "longrope"; with the same factors for short and long contexts it does not depend on the length."""
    factors = tensor.dequantize(torch.float32)
    if factors.shape != (head_dim // 2,) or not bool((torch.isfinite(factors) & (factors > 0)).all()):
        _refuse(
            fields, f"{tensor.name}, of the shape {list(tensor.shape)}, does not hold {head_dim // 2} positive factors"
        )
    if bool((factors == 1).all()):
        return {"rope_type": "default"}
    largest = float(factors.max())
    llama3 = {"rope_type": "llama3", "factor": largest, **_LLAMA3}
    if largest >= 1 and torch.allclose(factors, llama3_factors(llama3, base, head_dim), rtol=1e-5, atol=0):
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
