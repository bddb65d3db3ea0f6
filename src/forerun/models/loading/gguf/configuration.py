"""Converts the metadata of a GGUF file to a Transformers configuration."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.models.families.gguf_keys import (
    EXPERT_WIDTH,
    HEADS,
    KEY_HEADS,
    NEUTRAL,
    PATTERN,
    ROTATED,
    TEMPERATURE,
    TOP,
    WIDTH,
    WINDOW,
    Architecture,
    counts_of,
    layer_count,
    refuse,
)
from forerun.models.families.recurrent import TILED
from forerun.models.families.table import ARCHITECTURES
from forerun.models.families.tensor_names import EMBEDDING, HEAD
from forerun.models.loading.configuration import PlainConfig, check_values
from forerun.models.loading.gguf.file import REMEDY, GgufFile, GgufTensor, brief
from forerun.utils.foreign_errors import as_load_errors
from forerun.utils.json_file import REQUIRED, Fields

ROPE_FACTORS = "rope_freqs.weight"
_LONG = "rope_factors_long.weight"
_SHORT = "rope_factors_short.weight"


def architecture_of(file: GgufFile) -> str:
    """Return the name of the file's architecture, one of ARCHITECTURES.

    Raises:
        ModelLoadError: the metadata lacks it.
        UnsupportedModelError: it is another one, or the file holds no model.
    """
    kind = file.fields.string("general.type", "model")
    name = file.fields.string("general.architecture")
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
        if isinstance(value, list) and len({*value}) == 1 and not key.endswith(PATTERN):
            value = value[0]
        if isinstance(value, float) and float(np.float32(value)) == value:
            value = float(str(np.float32(value)))
        values[key] = value
    place = f"{file.path}: of its keys {name}.*"
    return Fields(place, {key.removeprefix(f"{name}."): values[key] for key in values}, ModelLoadError, REMEDY)


def read_gguf_config(file: GgufFile, eos_ids: Iterable[int]) -> dict[str, Any]:
    """Return the configuration of the file's model by Transformers' keys, "model_type" among them.

    Args:
        eos_ids: the tokens that end an output.

    Raises:
        ModelLoadError: a key is missing, or its value cannot be.
        UnsupportedModelError: another architecture, or something in it that Transformers' model does not compute.
    """
    name = architecture_of(file)
    fields = _keys_of(file, name)
    architecture = ARCHITECTURES[name]
    _check_keys(fields, architecture)
    if EMBEDDING not in file.tensors:
        raise ModelLoadError(f"{file.path}: it has no tensor {EMBEDDING}, and so no model. {REMEDY}")
    num_layers = layer_count(fields)
    if num_layers > len(file.tensors):  # configurations make lists of this length
        raise ModelLoadError(
            f"the metadata of {file.path} speaks of {num_layers} layers, and it has {len(file.tensors)} tensors. "
            f"{REMEDY}"
        )
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    vocab_size = len(tokens) if isinstance(tokens, list) else file.tensors[EMBEDDING].shape[0]
    bos = file.fields.integer("tokenizer.ggml.bos_token_id", None)
    values = {
        "vocab_size": vocab_size,
        "hidden_size": fields.integer("embedding_length", low=1),
        "num_hidden_layers": num_layers,
        "max_position_embeddings": fields.integer("context_length", low=1),
        **({architecture.eps: fields.number(architecture.eps_key, low=0)} if architecture.eps else {}),
        "tie_word_embeddings": HEAD not in file.tensors,  # the embedding, stored once, is the output layer as well
        "bos_token_id": bos if bos in range(vocab_size) else None,
        "eos_token_id": sorted(eos_ids) or None,
        "pad_token_id": None,  # Transformers' defaults are ids of the families' larger vocabularies
        "model_type": architecture.model_type,
        **(_attention(fields, architecture, file) if architecture.attends else _options(fields, architecture, file, 0)),
    }
    check_values(Fields.of(values, f"{file.path}: its metadata", ModelLoadError, remedy=REMEDY))
    return values


def _attention(fields: Fields, architecture: Architecture, file: GgufFile) -> dict[str, Any]:
    """Return the sizes of attention and feed-forward layers, the rotation, and the options of the model's type."""
    heads = _count(fields, architecture, HEADS)
    head_dim = fields.integer(ROTATED, low=1, high=2**31) if architecture.is_latent else _head_dim(fields, heads)
    options = _options(fields, architecture, file, head_dim)
    rope = _rope_by_kind(fields, file.tensors, architecture, head_dim, options)
    if "long_factor" in rope:  # Phi3's own option comes before this one of the rotation
        options["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads if architecture.is_latent else _count(fields, architecture, KEY_HEADS, heads),
        "head_dim": head_dim,
        "intermediate_size": _count(fields, architecture, WIDTH, fields.values.get(EXPERT_WIDTH, REQUIRED)),
        "rope_parameters": rope,
        **options,
    }


def _count(fields: Fields, architecture: Architecture, key: str, default: Any = REQUIRED) -> int:
    """Return a count of the layers that have what is counted; 1 if none has."""
    value = fields.values.get(key)
    if key in architecture.differing and isinstance(value, list):
        return counts_of(fields, key)[0]
    if key not in architecture.by_layer or value is None:
        return fields.integer(key, default, low=1)
    counts = {*fields.list_of(key, int)} - {0} if isinstance(value, list) else {fields.integer(key, low=0)} - {0}
    if len(counts) > 1:
        refuse(fields, f"{key} differs from layer to layer")
    if min(counts, default=1) < 1:
        raise fields.wrong(key, "a list of counts")
    return min(counts, default=1)


def _check_keys(fields: Fields, architecture: Architecture) -> None:
    """Refuse keys that stand for what no model of the architecture computes."""
    for key, neutral in NEUTRAL.items():
        value: Any = fields.values.get(key)
        if value is not None and value not in neutral and key not in architecture.reads:
            refuse(fields, f"{key} is {value!r:.60}")
    for key in (HEADS, KEY_HEADS, WIDTH, TOP, EXPERT_WIDTH):
        if isinstance(fields.values.get(key), list) and key not in (*architecture.by_layer, *architecture.differing):
            refuse(fields, f"{key} differs from layer to layer")


def _options(fields: Fields, architecture: Architecture, file: GgufFile, head_dim: int) -> dict[str, Any]:
    """Return the options of the model's type alone, and the type and others where they decide these."""
    windows = _windows(fields, architecture)
    if architecture.period is None and not windows and fields.values.get(TEMPERATURE):
        return {"model_type": "ministral3"}
    there = {re.sub(r"^blk\.\d+\.", "blk.0.", each) for each in file.tensors}
    is_there = {
        option: tensor in there or tensor.replace("attn_q.", "attn_qkv.") in there
        for option, tensor in architecture.biases.items()
    }
    order = {TILED: True} if architecture.heads_are_tiled else {}
    own = architecture.options(fields, head_dim, file.tensors)
    kind = {"model_type": "mixtral"} if own.get("model_type") == "mixtral" else {}  # which may have windows, too
    return {**architecture.constants, **is_there, **order, **own, **windows, **kind}


def _windows(fields: Fields, architecture: Architecture) -> dict[str, Any]:
    """Return the options of sliding windows, empty if there are none, and none can be."""
    window = fields.integer(WINDOW, architecture.window, low=0)
    period = architecture.period
    if period is None:
        if not 0 < window < fields.integer("context_length", low=1):
            return {}
        if architecture.windowed is None or PATTERN in fields:
            refuse(fields, f"it has a sliding window of {window} positions and does not say in which layers")
        return {"model_type": architecture.windowed, "sliding_window": window}
    if not window and architecture.windowed != architecture.model_type:
        return {}
    count = layer_count(fields)
    pattern = fields.values.get(PATTERN, period)
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        pattern = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(count)]
    if isinstance(pattern, list) and len(pattern) == fields.integer("block_count"):
        pattern = pattern[:count]
    if not isinstance(pattern, list) or len(pattern) != count or {*map(type, pattern)} != {bool}:
        raise fields.wrong(PATTERN, f"a whole number, or a list of {count} flags")
    kinds = ["sliding_attention" if window and is_sliding else "full_attention" for is_sliding in pattern]
    return {"model_type": architecture.windowed, "sliding_window": window or None, "layer_types": kinds}


def transformers_config(config: PlainConfig, place: str) -> Any:
    """Return the configuration as Transformers' class of its type, without keys of forerun's. place: the file, for
    messages.

    Raises:
        ModelLoadError: it describes no such model.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with as_load_errors(f"{place}: its metadata describes no {config.model_type} model", REMEDY):
        kind = CONFIG_MAPPING[config.model_type]
        values = {key: each for key, each in vars(config).items() if key != TILED and not _is_derived(kind, key)}
        return kind.from_dict(values)


def _is_derived(kind: type, key: str) -> bool:
    """Return whether a configuration of Transformers makes the value of a key of others."""
    found = getattr(kind, getattr(kind, "attribute_map", {}).get(key, key), None)
    return isinstance(found, property) and found.fset is None


def _head_dim(fields: Fields, heads: int) -> int:
    """Return the width of a head. Keys and values must have this width."""
    hidden = fields.integer("embedding_length", low=1)
    width = fields.integer("attention.key_length", None, low=1)
    if width is None and hidden % heads:
        raise fields.wrong("embedding_length", f"a multiple of the {heads} heads")
    width = width or hidden // heads
    if width % 2:
        refuse(fields, f"its heads are {width} wide, an odd number")
    if (other := fields.integer("attention.value_length", width, low=0)) != width:
        refuse(fields, f"attention.value_length is {other} and the heads are {width} wide")
    return width


def _rotated(fields: Fields, architecture: Architecture, head_dim: int) -> int:
    """Return how many numbers of a head are rotated: all, but in some architectures."""
    rotated = fields.integer(ROTATED, head_dim, low=0, high=2**31)
    if rotated != head_dim and (not architecture.is_partly_rotated or rotated % 2 or not 0 < rotated < head_dim):
        refuse(fields, f"rope.dimension_count is {rotated} and the heads are {head_dim} wide")
    return rotated


def _rope_by_kind(
    fields: Fields,
    tensors: Mapping[str, GgufTensor],
    architecture: Architecture,
    head_dim: int,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Return `rope_parameters` of a Transformers configuration: for each kind of layer, if they are rotated apart."""
    rotated = _rotated(fields, architecture, head_dim)
    found = _long_rope(fields, tensors, rotated) or rope_parameters(fields, tensors.get(ROPE_FACTORS), rotated)
    found |= architecture.yarn(fields) if found["rope_type"] == "yarn" else {}
    if architecture.is_partly_rotated:
        share = rotated / head_dim  # of which Transformers takes the whole part, after multiplying
        found["partial_rotary_factor"] = share if int(head_dim * share) == rotated else math.nextafter(share, 1.0)
    base = found["rope_theta"]
    local = fields.number("rope.freq_base_swa", architecture.local_base, low=1) or base
    if architecture.local_base is not None and "layer_types" in options:
        return {"full_attention": found, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
    if local != base:
        refuse(fields, f"rope.freq_base_swa is {local} and rope.freq_base is {base}")
    return found


def _long_rope(fields: Fields, tensors: Mapping[str, GgufTensor], rotated: int) -> dict[str, Any] | None:
    """Return the parameters of a rotation with factors for short and for long contexts; None if there are none."""
    if _LONG not in tensors and _SHORT not in tensors:
        return None
    for name in (_LONG, _SHORT):
        if name not in tensors:
            raise ModelLoadError(f"{fields.place}: the tensor {name} is missing. {REMEDY}")
    short, long = (_factors(fields, tensors[name], rotated).tolist() for name in (_SHORT, _LONG))
    context = fields.integer("context_length", low=1)
    original = fields.integer("rope.scaling.original_context_length", context, low=1)
    return {
        "rope_type": "longrope",
        "rope_theta": fields.number("rope.freq_base", 10000.0, low=1),
        "factor": context / original,
        "attention_factor": fields.number("rope.scaling.attn_factor", 1.0, low=0),
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
    }


# of all Llama 3 models with longer contexts; their factor differs
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_parameters(fields: Fields, factors: GgufTensor | None, rotated: int) -> dict[str, Any]:
    """Return `rope_parameters` of a Transformers configuration.

    Args:
        factors: the tensor `rope_freqs.weight`, by which the frequencies are divided.
        rotated: numbers of a head that are rotated.

    Raises:
        ModelLoadError: a value cannot be.
        UnsupportedModelError: the scaling is of another kind than linear, yarn, or by factors.
    """
    base = fields.number("rope.freq_base", 10000.0, low=1)
    kind = fields.string("rope.scaling.type", "linear")  # llama.cpp's default
    factor = fields.number("rope.scaling.factor", 0.0, low=0) or fields.number("rope.scale_linear", 0.0, low=0) or 1.0
    if kind not in ("none", "linear", "yarn"):
        refuse(fields, f"rope.scaling.type is {kind[:60]!r} and not none, linear or yarn")
    is_default = kind == "none" or (kind == "linear" and factor == 1)
    scaled: dict[str, Any] = {"rope_type": "default"} if is_default else {"rope_type": kind, "factor": factor}
    context = fields.integer("rope.scaling.original_context_length", fields.integer("context_length", low=1), low=1)
    if kind != "yarn" and (attention := fields.number("rope.scaling.attn_factor", 1.0)) != 1:
        refuse(fields, f"rope.scaling.attn_factor is {attention} and rope.scaling.type is {kind}")
    if kind == "yarn":
        scaled |= {**_yarn(fields, factor), "original_max_position_embeddings": context}
    if temperature := fields.number(TEMPERATURE, 0.0, low=0):  # by which queries grow with every such length
        scaled |= {"llama_4_scaling_beta": temperature, "original_max_position_embeddings": context}
    if factors is not None:
        if not is_default:
            refuse(fields, f"its rotary embedding is scaled by {kind} and by {factors.name} together")
        scaled = _by_factors(fields, factors, base, rotated)
    return {"rope_theta": base, **scaled}


def _yarn(fields: Fields, factor: float) -> dict[str, Any]:
    """Return the parameters of a YaRN scaling. The converter writes the configuration's attention factor as
    yarn_attn_factor, which llama.cpp does not read; without it, the factor is that of the paper, 0.1 ln(factor) + 1,
    divided by the same with the logarithm multiplied (Transformers' `mscale_all_dim`)."""
    growth = 0.1 * math.log(max(factor, 1.0))
    multiplier = fields.number("rope.scaling.yarn_log_multiplier", 0.0, low=0)
    papers = (growth + 1.0) / (growth * multiplier + 1.0)
    attention = fields.number("rope.scaling.yarn_attn_factor", papers, low=0)
    return {
        "attention_factor": attention * fields.number("rope.scaling.attn_factor", 1.0, low=0),
        "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0, low=0),
        "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0, low=0),
    }


def _factors(fields: Fields, tensor: GgufTensor, rotated: int) -> torch.Tensor:
    """Return the numbers of a tensor by which frequencies are divided, [rotated / 2]."""
    factors = tensor.dequantize(torch.float32)
    if factors.shape != (rotated // 2,) or not bool((torch.isfinite(factors) & (factors > 0)).all()):
        refuse(
            fields, f"{tensor.name}, of the shape {list(tensor.shape)}, does not hold {rotated // 2} positive factors"
        )
    return factors


_NONE = 1e29
"""Numbers whose frequency is divided by as much are not rotated."""


def _by_factors(fields: Fields, tensor: GgufTensor, base: float, rotated: int) -> dict[str, Any]:
    """Return Llama 3's parameters if they give these factors, else the factors themselves. Transformers calls a scaling
    by given factors "longrope"; with the same factors for short and long contexts it does not depend on the length."""
    factors = _factors(fields, tensor, rotated)
    if bool((factors == 1).all()):
        return {"rope_type": "default"}
    count = int((factors == 1).sum())
    if bool((factors[:count] == 1).all() and (factors[count:] >= _NONE).all()):
        return {"rope_type": "proportional", "partial_rotary_factor": count / len(factors)}
    largest = float(factors.max())
    llama3 = {"rope_type": "llama3", "factor": largest, **_LLAMA3}
    if largest >= 1 and torch.allclose(factors, llama3_factors(llama3, base, rotated), rtol=1e-5, atol=0):
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
