"""What llama.cpp's converter does with recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_VALUES = (".in_proj_qkv.", ".in_proj_z.", ".conv1d.", ".out_proj.")
"""Tensors of the gated delta rule with numbers of values, not of heads."""


def metadata(config: Any) -> dict[str, Any]:
    """Keys beyond those of attention."""
    if config.model_type == "qwen3_5_text":
        heads = config.linear_num_value_heads
        return {
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": heads,
            "ssm.inner_size": config.linear_value_head_dim * heads,
            "full_attention_interval": config.layer_types.index("full_attention") + 1,
            "rope.dimension_sections": [11, 11, 10, 0],
        }
    return {}


def renamed(name: str) -> str:
    """A parameter's name as the gguf package knows it."""
    return name.replace(".dt_bias", ".dt_proj.bias")


def is_exact(name: str) -> bool:
    """Whether a tensor is in float32 always."""
    return "conv1d" in name


def written(name: str, tensor: Tensor, config: Any, *, back: bool = False) -> Tensor:
    """The numbers that are written for a parameter; of a matrix, back from these to those that it has."""
    if name.endswith(".A_log"):
        tensor = tensor.neg().log() if back else -tensor.exp()
    if "conv1d" in name:
        tensor = tensor[:, None] if back else tensor.squeeze(1)
    if ".linear_attn." in name and ".norm." not in name:
        return _tiled(name, tensor, config, back=back)
    return tensor


def _tiled(name: str, tensor: Tensor, config: Any, *, back: bool) -> Tensor:
    """Value heads beside those of other key heads."""
    groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
    width = config.linear_value_head_dim if any(part in name for part in _VALUES) else 1
    first = 2 * groups * config.linear_key_head_dim if ".in_proj_qkv." in name or ".conv1d." in name else 0
    axis = 1 if ".out_proj." in name else 0
    before, values = tensor.split([first, heads * width], axis)
    counts = (heads // groups, groups) if back else (groups, heads // groups)
    shape = values.shape
    values = values.unflatten(axis, (*counts, width)).transpose(axis, axis + 1).reshape(shape)
    return torch.cat([before, values], axis)
