"""What llama.cpp's converter does with attention that keeps latents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_WIDTHS = {"q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 96}
SIZES: Mapping[str, dict[str, Any]] = {
    "deepseek_v2": {**_WIDTHS, "q_lora_rank": None, "moe_intermediate_size": 64},
    "deepseek_v3": _WIDTHS,
    "glm4_moe_lite": {**_WIDTHS, "moe_intermediate_size": 64},
    # whose factors, and widths of values, no file says
    "minicpm3": {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 16, "dim_model_base": 256},
}
"""Options of tiny models, of which files say all."""


def _is_taken_apart(name: str, config: Any) -> bool:
    return name.endswith("kv_b_proj.weight") and config.model_type != "minicpm3"


def written(name: str, tensor: Tensor, config: Any, *, is_whole: bool) -> dict[str, Tensor] | None:
    """The tensors that are written for what makes keys and values of latents, by their names in the file; None for
    another parameter. is_whole: there is one, as converters formerly wrote it."""
    if is_whole or not _is_taken_apart(name, config):
        return None
    layer, heads = name.split(".")[2], tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
    return {f"blk.{layer}.attn_k_b.weight": keys.mT.contiguous(), f"blk.{layer}.attn_v_b.weight": values.contiguous()}


def read(name: str, means: list[Tensor], config: Any) -> list[Tensor]:
    """The parameter that tensors in the file stand for; what is none such, as it is."""
    if len(means) == 1 or not _is_taken_apart(name, config):
        return means
    keys, values = means
    return [torch.cat([keys.mT, values], 1).flatten(0, 1)]


def metadata(config: Any) -> dict[str, Any]:
    """Keys beyond, or in place of, those of other attention."""
    if not hasattr(config, "kv_lora_rank"):
        return {}
    rank, rotated, rope = config.kv_lora_rank, config.qk_rope_head_dim, config.rope_parameters
    found = {"attention.q_lora_rank": config.q_lora_rank, "attention.kv_lora_rank": rank}
    found |= {"rope.dimension_count": rotated}
    width = config.qk_nope_head_dim + rotated
    if config.model_type == "minicpm3":
        return {**found, "attention.key_length": width, **dict.fromkeys(("attention.value_length", "logit_scale"))}
    return {
        **found,
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": width,
        "attention.value_length_mla": config.v_head_dim,
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"] if "mscale_all_dim" in rope else None,
    }
