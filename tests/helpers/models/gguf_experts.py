"""What llama.cpp's converter does with mixtures of experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_UNSAID = {"routed_scaling_factor": 1.0}
_WINDOWED = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
SIZES: Mapping[str, dict[str, Any]] = {
    "dots1": {"layer_types": None, "moe_intermediate_size": 64},
    "ernie4_5_moe": {"moe_intermediate_size": 64},
    "exaone_moe": {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5},
    "gemma4_text": {"head_dim": 16, "global_head_dim": 24, "hidden_size_per_layer_input": 32},
    "glm4_moe": {"moe_intermediate_size": 64},
    "gpt_oss": {**_WINDOWED, "max_position_embeddings": 4096},
    "granitemoe": {},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "lfm2_moe": {"tie_word_embeddings": True, **_UNSAID},
    "minimax_m2": {},
    "mixtral": {},
    "olmoe": {"rms_norm_eps": 1e-5},
    "qwen2_moe": {"norm_topk_prob": False},
    "qwen3_5_moe_text": {"linear_num_value_heads": 8, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen3_next": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": True,
    },
}
"""Options of tiny models, of which files say all."""
_STACK = re.compile(r"model\.layers\.(\d+)\.(?:.+\.)?experts\.(gate_up|down)_proj(_bias)?$")
_OTHERS = {
    r"block_sparse_moe\.router\.weight": "ffn_gate_inp.weight",
    r"feed_forward\.gate\.weight": "ffn_gate_inp.weight",
    r"feed_forward\.expert_bias": "exp_probs_b.bias",
    r"mlp\..*e_score_correction_bias": "exp_probs_b.bias",
    r"self_attn\.sinks": "attn_sinks.weight",
    r"layer_scalar": "layer_output_scale.weight",
    r"router\.scale": "ffn_gate_inp.scale",
    r"router\.per_expert_scale": "ffn_down_exps.scale",
    r"shared_mlp\.output_linear\.weight": "ffn_down_shexp.weight",
}
_EXACT = (
    "mlp.gate.weight",
    "gate.wg.weight",
    "router.weight",
    "router.proj.weight",
    "feed_forward.gate.weight",
    "shared_expert_gate.weight",
)


def is_exact(name: str) -> bool:
    """Whether a tensor is in float32 always."""
    return name.endswith((*_EXACT, "_bias"))


def written(name: str, tensor: Tensor, config: Any, *, is_fused: bool) -> dict[str, Tensor] | None:
    """The tensors that are written for a parameter of a mixture of experts, by their names in the file; None of
    another. is_fused: gates and what they are of are one tensor."""
    layer = name.split(".")[2] if name.count(".") > 2 else ""
    if found := _STACK.fullmatch(name):
        kind, is_turned = "bias" if found[3] else "weight", config.model_type == "gpt_oss"
        tensor = tensor.mT if is_turned and kind == "weight" else tensor
        if found[2] == "down":
            return {f"blk.{layer}.ffn_down_exps.{kind}": tensor.contiguous()}
        if is_fused:
            return {f"blk.{layer}.ffn_gate_up_exps.{kind}": tensor}
        parts = (tensor[:, ::2], tensor[:, 1::2]) if is_turned else tensor.chunk(2, 1)
        names = (f"blk.{layer}.ffn_{part}_exps.{kind}" for part in ("gate", "up"))
        return {each: part.contiguous() for each, part in zip(names, parts, strict=True)}
    if name.endswith("shared_mlp.input_linear.weight") and getattr(config, "num_local_experts", 0):
        names = (f"blk.{layer}.ffn_{part}_shexp.weight" for part in ("gate", "up"))
        return dict(zip(names, tensor.chunk(2), strict=True))
    if name.endswith("shared_expert_gate.weight") and config.model_type == "qwen2_moe":  # as formerly of all
        return {f"blk.{layer}.ffn_gate_inp_shexp.weight": tensor[0]}
    for pattern, theirs in _OTHERS.items():
        if re.search(pattern, name) and not (theirs.endswith("_shexp.weight") and not config.num_local_experts):
            return {f"blk.{layer}.{theirs}": tensor}
    return None


def read(name: str, means: list[Tensor], config: Any) -> Tensor:
    """The parameter that tensors in the file stand for."""
    if not _STACK.fullmatch(name):
        return torch.cat(means)
    if config.model_type != "gpt_oss":
        return torch.cat(means, 1)
    rows = torch.stack(means, 2).flatten(1, 2)
    return rows if name.endswith("_bias") else rows.mT


def metadata(config: Any) -> dict[str, Any]:
    """Keys beyond, or in place of, those of dense models."""

    def first(*names: str) -> Any:
        return next((value for name in names if (value := getattr(config, name, None)) is not None), None)

    kind, count = config.model_type, first("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if not count or kind == "nemotron_h":  # of it, other layers would have them
        return {}
    width = first("moe_intermediate_size")
    if kind in ("gpt_oss", "minimax_m2", "hunyuan_v1_moe"):
        width = config.intermediate_size
    found = {
        "expert_count": count,
        "expert_used_count": first("num_experts_per_tok", "moe_k", "moe_topk"),
        "expert_feed_forward_length": width,
        "expert_shared_feed_forward_length": first("shared_expert_intermediate_size", "shared_intermediate_size"),
        "expert_shared_count": first("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
        "expert_group_count": first("n_group"),
        "expert_group_used_count": first("topk_group"),
    }
    if kind in ("dots1", "exaone_moe", "glm4_moe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"):
        found |= {
            "expert_weights_scale": float(config.routed_scaling_factor),
            "expert_weights_norm": config.norm_topk_prob,
            "leading_dense_block_count": config.mlp_layer_types.count("dense")
            if kind in ("exaone_moe", "glm4_moe_lite")
            else config.first_k_dense_replace,
        }
    if kind in ("dots1", "exaone_moe", "glm4_moe", "minimax_m2", "lfm2_moe", "deepseek_v3"):
        found["expert_gating_func"] = 2
    more: dict[str, dict[str, Any]] = {
        "ernie4_5_moe": {
            "expert_shared_feed_forward_length": config.intermediate_size // config.num_key_value_heads,
            "interleave_moe_layer_step": first("moe_layer_interval"),
            "leading_dense_block_count": first("moe_layer_start_index"),
        }
        if kind == "ernie4_5_moe"
        else {},
        "exaone_moe": {"expert_shared_feed_forward_length": width, "rope.scaling.type": "none"},
        "hunyuan_v1_moe": {"expert_shared_feed_forward_length": width, "expert_shared_count": 1},
        "lfm2_moe": {"leading_dense_block_count": first("num_dense_layers")},
    }
    return found | more.get(kind, {})
