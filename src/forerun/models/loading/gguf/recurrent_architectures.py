"""The architectures of GGUF files with recurrent layers (`architectures.py`).

Files that llama.cpp's converter makes of tiny models of each (that of llama-cpp-python 0.3.36) give llama.cpp's logits
in float32; but for a Bamba of whose heads a half is rotated, which gives Transformers'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from forerun.models.loading.gguf.architecture import (
    GRANITE_FACTORS,
    KEY_HEADS,
    NEXT_TOKENS,
    RMS_NORM,
    SECTIONS,
    WIDTH,
    Architecture,
    granite_factors,
    layer_count,
    refuse,
)
from forerun.models.loading.gguf.mixture import (
    EXPERTS,
    LEADING,
    LOCAL,
    SHARED_WIDTH,
    SIGMOID,
    experts_of_qwen,
    mixture,
    num_dense,
)
from forerun.utils.json_file import Fields

_RECURRENT = "attention.recurrent_layers"
_INTERVAL = "full_attention_interval"
_MOST_TAPS = 16


def _state(fields: Fields) -> dict[str, int]:
    """Return the sizes of the states by key, checked against each other."""
    keys = ("conv_kernel", "group_count", "inner_size", "state_size", "time_step_rank")
    found = {key: fields.integer(f"ssm.{key}", low=1, high=2**31 - 1) for key in keys}
    if found["conv_kernel"] > _MOST_TAPS:
        raise fields.wrong("ssm.conv_kernel", f"{_MOST_TAPS} at most")
    for key, part in (("time_step_rank", "group_count"), ("inner_size", "time_step_rank")):
        if found[key] % found[part]:
            raise fields.wrong(f"ssm.{key}", f"a multiple of {found[part]}, which is ssm.{part}")
    return found


def _qwen35(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    count = layer_count(fields)
    interval = fields.integer(_INTERVAL, 4, low=1)
    flags = fields.values.get(_RECURRENT)
    state = _state(fields)
    if flags is None:
        flags = [bool((layer + 1) % interval) for layer in range(count)]
    elif not isinstance(flags, list):  # the same of all layers
        flags = [flags] * count
    if len(flags) < count or not all(flag in (0, 1) for flag in flags):
        raise fields.wrong(_RECURRENT, f"a list of {count} flags")
    return {
        "layer_types": ["linear_attention" if flag else "full_attention" for flag in flags[:count]],
        "linear_conv_kernel_dim": state["conv_kernel"],
        "linear_key_head_dim": state["state_size"],
        "linear_value_head_dim": state["inner_size"] // state["time_step_rank"],
        "linear_num_key_heads": state["group_count"],
        "linear_num_value_heads": state["time_step_rank"],
    }


def _by_layer(fields: Fields, key: str) -> list[int]:
    """Return a count of each layer."""
    number = fields.integer("block_count", low=1)
    value = fields.values.get(key)
    counts = fields.list_of(key, int) if isinstance(value, list) else [fields.integer(key)] * number
    if len(counts) != number:
        raise fields.wrong(key, f"a list of {number} counts")
    return counts


def _mamba(fields: Fields) -> dict[str, Any]:
    """Return the sizes of a state space by the names of Bamba and its successors. No file says limits of the steps,
    and in llama.cpp there are none."""
    state = _state(fields)
    hidden = fields.integer("embedding_length", low=1)
    return {
        "mamba_n_heads": state["time_step_rank"],
        "mamba_d_head": state["inner_size"] // state["time_step_rank"],
        "mamba_n_groups": state["group_count"],
        "mamba_d_state": state["state_size"],
        "mamba_d_conv": state["conv_kernel"],
        "mamba_expand": state["inner_size"] // hidden,
        "time_step_limit": _UNLIMITED,
    }


def _granitehybrid(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    kinds = ["full_attention" if heads else "linear_attention" for heads in _by_layer(fields, KEY_HEADS)]
    is_rotated = fields.flag("rope.scaling.finetuned", True)
    attending = [kind == "full_attention" for kind in kinds]
    options = {"layer_types": kinds, "attn_layer_indices": [i for i, attends in enumerate(attending) if attends]}
    if is_rotated and not any(key in fields for key in GRANITE_FACTORS):
        return {"model_type": "bamba", **_mamba(fields), **options}
    if is_rotated and (rotated := fields.integer("rope.dimension_count", width)) != width:
        refuse(fields, f"rope.dimension_count is {rotated} and the heads are {width} wide")
    experts: dict[str, int] = {"num_local_experts": 0}
    wide = fields.integer(SHARED_WIDTH, 0, low=0)
    if fields.integer(EXPERTS, 0, low=0):
        experts = mixture(fields, LOCAL, width=fields.integer(WIDTH, low=1), reads=(SHARED_WIDTH,))
    elif not wide:
        wide = fields.integer(WIDTH, low=1)
    return {
        **_mamba(fields),
        "layer_types": kinds,
        "shared_intermediate_size": wide,
        "position_embedding_type": "rope" if is_rotated else "nope",
        **experts,
        **granite_factors(fields, width),
    }


def _falcon_h1(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    # the factors of embeddings and outputs, which differ, are in the weights
    if "output.weight" not in tensors:
        refuse(fields, "there is no tensor output.weight")
    state = _mamba(fields)
    return {
        **state,
        "mamba_d_ssm": state["mamba_n_heads"] * state["mamba_d_head"],
        "layer_types": ["hybrid"] * fields.integer("block_count", low=1),
    }


def _lfm2(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "layer_types": ["full_attention" if heads else "conv" for heads in _by_layer(fields, KEY_HEADS)],
        "conv_L_cache": fields.integer("shortconv.l_cache", low=1, high=_MOST_TAPS),
        "norm_eps": fields.number(RMS_NORM, low=0),
    }


def _lfm2moe(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_lfm2(fields, width, tensors),
        **mixture(fields, gating=SIGMOID, reads=(LEADING,)),
        "num_dense_layers": num_dense(fields),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def _nemotron_h(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    state = _state(fields)
    kinds = []
    for heads, wide in zip(_by_layer(fields, KEY_HEADS), _by_layer(fields, WIDTH), strict=True):
        if heads and wide:
            refuse(fields, f"a layer has {KEY_HEADS} and {WIDTH}")
        kinds.append("full_attention" if heads else "mlp" if wide else "linear_attention")
    return {
        "layer_types": kinds,
        "mamba_num_heads": state["time_step_rank"],
        "mamba_head_dim": state["inner_size"] // state["time_step_rank"],
        "n_groups": state["group_count"],
        "ssm_state_size": state["state_size"],
        "conv_kernel": state["conv_kernel"],
        "layer_norm_epsilon": fields.number(RMS_NORM, low=0),
    }


def _mamba2(fields: Fields, width: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    state = _state(fields)
    hidden = fields.integer("embedding_length", low=1)
    return {
        "layer_types": ["linear_attention"] * fields.integer("block_count", low=1),
        "num_heads": state["time_step_rank"],
        "head_dim": state["inner_size"] // state["time_step_rank"],
        "expand": state["inner_size"] // hidden,
        "n_groups": state["group_count"],
        "state_size": state["state_size"],
        "conv_kernel": state["conv_kernel"],
        "layer_norm_epsilon": fields.number(RMS_NORM, low=0),
        "time_step_limit": _UNLIMITED,
    }


_UNLIMITED = (0.0, math.inf)
_LEAST_STEP = 1e-30
"""Transformers takes its logarithm."""
_FACTORS = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)
_SSM_BIAS = {"mamba_conv_bias": "blk.0.ssm_conv1d.bias", "mamba_proj_bias": "blk.0.ssm_in.bias"}
_BIAS = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
RECURRENT_ARCHITECTURES = {
    "falcon-h1": Architecture(
        "falcon_h1",
        biases={
            **_BIAS,
            **_SSM_BIAS,
            "projectors_bias": "blk.0.ssm_out.bias",
            "mamba_rms_norm": "blk.0.ssm_norm.weight",
        },
        constants={
            **dict.fromkeys(_FACTORS, 1.0),
            "mlp_multipliers": [1.0] * 2,
            "ssm_multipliers": [1.0] * 5,
            "hidden_act": "silu",
            "mamba_norm_before_gate": False,
        },
        options=_falcon_h1,
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        True,
        {**_BIAS, **_SSM_BIAS},
        is_partly_rotated=True,
        by_layer=(KEY_HEADS,),
        constants={"hidden_act": "silu"},
        options=_granitehybrid,
        reads=(EXPERTS, *GRANITE_FACTORS),
    ),
    "lfm2": Architecture(
        "lfm2",
        biases={"conv_bias": "blk.0.shortconv.in_proj.bias"},
        eps=None,
        by_layer=(KEY_HEADS,),
        constants={"block_auto_adjust_ff_dim": False},
        options=_lfm2,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        biases={"conv_bias": "blk.0.shortconv.in_proj.bias", "use_expert_bias": "blk.0.exp_probs_b.bias"},
        eps=None,
        by_layer=(KEY_HEADS,),
        options=_lfm2moe,
        reads=(EXPERTS,),
    ),
    "mamba2": Architecture(
        "mamba2",
        biases={"use_conv_bias": "blk.0.ssm_conv1d.bias", "use_bias": "blk.0.ssm_in.bias"},
        eps=None,
        attends=False,
        constants={"hidden_act": "silu"},
        options=_mamba2,
    ),
    # Queries and keys are permuted, though they are not rotated; llama.cpp does not limit the steps, for which
    # Transformers has a least one.
    "nemotron_h": Architecture(
        "nemotron_h",
        True,
        biases={
            "mlp_bias": "blk.0.ffn_up.bias",
            "use_conv_bias": "blk.0.ssm_conv1d.bias",
            "use_bias": "blk.0.ssm_in.bias",
        },
        eps=None,
        by_layer=(KEY_HEADS, WIDTH),
        constants={"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "time_step_min": _LEAST_STEP},
        options=_nemotron_h,
    ),
    # Positions in a text are the same in all sections, as of "qwen2vl".
    "qwen35": Architecture(
        "qwen3_5_text",
        is_partly_rotated=True,
        constants={"attention_bias": False, "hidden_act": "silu"},
        options=_qwen35,
        heads_are_tiled=True,
        reads=(SECTIONS, NEXT_TOKENS),
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        is_partly_rotated=True,
        constants={"attention_bias": False, "hidden_act": "silu"},
        options=lambda fields, *rest: {**_qwen35(fields, *rest), **experts_of_qwen(fields)},
        heads_are_tiled=True,
        reads=(EXPERTS, SECTIONS, NEXT_TOKENS),
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        is_partly_rotated=True,
        constants={"attention_bias": False, "hidden_act": "silu"},
        options=lambda fields, *rest: {**_qwen35(fields, *rest), **experts_of_qwen(fields)},
        reads=(EXPERTS, NEXT_TOKENS),
    ),
}
