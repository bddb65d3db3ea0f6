"""What llama.cpp's converter does with models that have recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_UNLIMITED = {"time_step_limit": (0.0, float("inf"))}
SIZES: Mapping[str, dict[str, Any]] = {
    "bamba": _UNLIMITED,
    "falcon_h1": {**_UNLIMITED, "mamba_norm_before_gate": False},
    "granitemoehybrid": {**_UNLIMITED, "position_embedding_type": "nope"},
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "mamba2": {**_UNLIMITED, "expand": 2, "num_heads": 4},
    "nemotron_h": {"time_step_min": 1e-30},
    "qwen3_5_text": {
        "num_hidden_layers": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "linear_num_value_heads": 8,
    },
}
"""Options of tiny models, of which files say all: no limits of steps, nor that a norm is before the gate. Qwen3.5's
heads are reordered, and 24 numbers wide, so that blocks of 32 hold columns of two."""
_VALUES = (".in_proj_qkv.", ".in_proj_z.", ".conv1d.", ".out_proj.")
"""Tensors of the gated delta rule with numbers of values, not of heads."""
_NUMBERS = (".A_log", ".D", ".dt_bias", "norm.weight")


def metadata(config: Any) -> dict[str, Any]:
    """Keys beyond, or in place of, those of attention."""
    find = {
        "qwen3_5_text": _qwen35,
        "qwen3_5_moe_text": _qwen35,
        "qwen3_next": _qwen35,
        "bamba": _granite,
        "granitemoehybrid": _granite,
        "falcon_h1": _falcon_h1,
        "lfm2": _lfm2,
        "lfm2_moe": _lfm2,
        "nemotron_h": _nemotron_h,
        "mamba2": _mamba2,
    }.get(config.model_type)
    return {} if find is None else find(config)


def _qwen35(config: Any) -> dict[str, Any]:
    values = config.linear_value_head_dim * config.linear_num_value_heads
    return {
        **_state(config.linear_num_value_heads, values, config.linear_num_key_heads, config.linear_key_head_dim),
        "full_attention_interval": config.layer_types.index("full_attention") + 1,
        "rope.dimension_sections": None if config.model_type == "qwen3_next" else [11, 11, 10, 0],
    }


def _state(heads: int, inner: int, groups: int, size: int) -> dict[str, Any]:
    found = {"conv_kernel": 4, "state_size": size, "group_count": groups, "time_step_rank": heads, "inner_size": inner}
    return {f"ssm.{key}": value for key, value in found.items()}


def _hybrid(config: Any) -> dict[str, Any]:
    heads = config.mamba_n_heads
    return _state(heads, heads * config.mamba_d_head, config.mamba_n_groups, config.mamba_d_state)


def _key_heads(config: Any) -> list[int]:
    return [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]


def _granite(config: Any) -> dict[str, Any]:
    wide, is_rotated = getattr(config, "shared_intermediate_size", None), config.model_type == "bamba"
    return {
        **_hybrid(config),
        "attention.head_count_kv": _key_heads(config),
        "rope.scaling.finetuned": is_rotated,
        "expert_count": None if is_rotated else 0,
        "expert_shared_feed_forward_length": wide,
    }


def _falcon_h1(config: Any) -> dict[str, Any]:
    return {**_hybrid(config), "embedding_scale": None, "rope.dimension_count": None}


def _lfm2(config: Any) -> dict[str, Any]:
    return {
        "attention.head_count_kv": _key_heads(config),
        "shortconv.l_cache": config.conv_L_cache,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
    }


def _nemotron_h(config: Any) -> dict[str, Any]:
    heads, wide = config.mamba_num_heads, config.intermediate_size
    return {
        **_state(heads, heads * config.mamba_head_dim, config.n_groups, config.ssm_state_size),
        "attention.head_count_kv": _key_heads(config),
        "feed_forward_length": [wide if kind == "mlp" else 0 for kind in config.layer_types],
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
    }


def _mamba2(config: Any) -> dict[str, Any]:
    return {
        **_state(config.num_heads, config.num_heads * config.head_dim, config.n_groups, config.state_size),
        "block_count": config.num_hidden_layers,
        "context_length": 2**20,
        "embedding_length": config.hidden_size,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
    }


def is_exact(name: str) -> bool:
    """Whether a tensor is in float32 always."""
    return "conv1d" in name or ".conv.conv." in name or name.endswith(_NUMBERS)


def written(name: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
    """The tensors that are written for a parameter, by names that the gguf package knows."""
    if "in_proj_qkvz" in name:
        rows, layer = _of_parts(config), name.split(".")[2]
        first = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        first += config.linear_num_value_heads * config.linear_value_head_dim
        parts = tensor[rows].tensor_split([first])
        return dict(zip((f"blk.{layer}.{part}.weight" for part in ("attn_qkv", "attn_gate")), parts, strict=True))
    if "shared_mlp.input_linear" in name:
        names = (name.replace("shared_mlp.input_linear", f"mlp.{part}_proj") for part in ("gate", "up"))
        return dict(zip(names, tensor.chunk(2), strict=True))
    their_name = name.replace(".dt_bias", ".dt_proj.bias").replace("shared_mlp.output_linear", "mlp.down_proj")
    if config.model_type == "nemotron_h":
        their_name = their_name.replace("model.", "backbone.")
    return {their_name: _converted(name, tensor, config)}


def _converted(name: str, tensor: Tensor, config: Any) -> Tensor:
    tensor = -tensor.exp() if name.endswith(".A_log") else tensor
    tensor = tensor.squeeze(1) if name.endswith(("conv1d.weight", "conv.conv.weight")) else tensor
    if ".linear_attn." in name:
        return tensor if config.model_type == "qwen3_next" else _tiled(name, tensor, config, back=False)
    if name.endswith((".A_log", ".D")):
        return tensor[:, None]
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return tensor.view(getattr(config, "mamba_n_groups", None) or config.n_groups, -1)
    return tensor * _factor(name, config)


def _of_parts(config: Any) -> Tensor:
    """The rows of Qwen3-Next's queries, of keys, of values and of gates, which each key head has side by side."""
    groups, key = config.linear_num_key_heads, config.linear_key_head_dim
    value = config.linear_num_value_heads // groups * config.linear_value_head_dim
    rows = torch.arange(groups * 2 * (key + value)).view(groups, -1)
    return torch.cat([part.reshape(-1) for part in rows.split([key, key, value, value], 1)])


def read(name: str, means: Tensor, config: Any) -> Tensor:
    """The parameter that a matrix in the file stands for."""
    if "in_proj_qkvz" in name:
        return means[_of_parts(config).argsort()]
    if config.model_type == "qwen3_next":
        return means
    return _tiled(name, means, config, back=True) if ".linear_attn." in name else means / _factor(name, config)


def _tiled(name: str, tensor: Tensor, config: Any, *, back: bool) -> Tensor:
    """Value heads beside those of other key heads."""
    if ".norm." in name:
        return tensor
    groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
    width = config.linear_value_head_dim if any(part in name for part in _VALUES) else 1
    first = 2 * groups * config.linear_key_head_dim if ".in_proj_qkv." in name or ".conv1d." in name else 0
    axis = 1 if ".out_proj." in name else 0
    before, values = tensor.split([first, heads * width], axis)
    counts = (heads // groups, groups) if back else (groups, heads // groups)
    shape = values.shape
    values = values.unflatten(axis, (*counts, width)).transpose(axis, axis + 1).reshape(shape)
    return torch.cat([before, values], axis)


def _factor(name: str, config: Any) -> Tensor | float:
    """Falcon-H1's factors of a tensor's rows."""
    if config.model_type != "falcon_h1":
        return 1.0
    if ".in_proj." in name:
        inner, states = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        sizes = torch.tensor([inner, inner, states, states, config.mamba_n_heads])
        return config.ssm_in_multiplier * torch.tensor(config.ssm_multipliers).repeat_interleave(sizes)[:, None]
    entering = config.attention_in_multiplier
    factors = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * entering,
        "q_proj": entering,
        "v_proj": entering,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    return float(factors.get(name.split(".")[-2], 1.0))
