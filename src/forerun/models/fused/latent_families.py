"""How the families whose attention keeps latents differ from Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log
from typing import Any

from forerun.models.fused.expert_families import behind_dense, corrected, mlp
from forerun.models.fused.options import Difference, biases_of
from forerun.models.spec.feed_forward import Experts


def _scale(config: Any, width: int) -> float:
    """Return the factor of scores; some scalings of the rotation have a part in it."""
    rope = config.rope_parameters
    every = 0 if rope["rope_type"] == "default" else rope.get("mscale_all_dim") or 0
    growth = 0.1 * every * log(rope["factor"]) + 1.0 if every and rope["factor"] > 1 else 1.0
    return float(width**-0.5 * growth * growth)


def _latent(config: Any) -> Difference:
    attention = "self_attn."
    entry = config.q_lora_rank or 0
    latent = {"kv_lora_rank": config.kv_lora_rank, "v_head_dim": config.v_head_dim, "q_lora_rank": entry}
    modules = (
        {"query": "q_b_proj", "q_a_proj": "q_a_proj", "q_a_layernorm": "q_a_layernorm"}
        if entry
        else {"query": "q_proj"}
    )
    modules |= {"kv_a_proj": "kv_a_proj_with_mqa", "kv_a_layernorm": "kv_a_layernorm"}
    width = config.qk_nope_head_dim + config.qk_rope_head_dim
    return {
        "heads": (config.num_attention_heads, 1, width),
        "latent": latent,
        "modules": {role: attention + name for role, name in modules.items()} | {"key": None, "value": None},
        "rotated": config.qk_rope_head_dim,
        "scale": _scale(config, width),
        "biases": frozenset({"q_a_proj", "kv_a_proj", "out"} if config.attention_bias else ()),
    }


def _deepseek_v2(config: Any) -> Difference:
    found = _latent(config)
    shared = config.n_shared_experts or 0
    width = config.moe_intermediate_size
    groups = config.n_group if config.topk_method == "group_limited_greedy" else 0
    experts = Experts(
        num_experts=config.n_routed_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=width,
        shared_intermediate_size=width * shared,
        unrounded=True,
        n_group=groups,
        topk_group=config.topk_group if groups else 0,
        scores_of_group=1,
        norm_topk_prob=False,
        routed_scaling_factor=config.routed_scaling_factor,
    )
    feed = biases_of(config, "mlp_bias")
    return {
        **found,
        "experts": experts,
        "modules": found["modules"] | (mlp("mlp.shared_experts") if shared else {}),
        "mixed": behind_dense(config),
        "biases": found["biases"] | feed | {f"shared_{role}" for role in feed},
        "is_interleaved": True,
        "unserved": [] if config.topk_method in ("greedy", "group_limited_greedy") else ["topk_method"],
    }


def _deepseek_v3(config: Any) -> Difference:
    found = _latent(config)
    experts = corrected(config, config.n_routed_experts, config.n_shared_experts or 0)
    modules = found["modules"] | experts["modules"]
    interleaved = bool(config.rope_interleave)
    return {**found, **experts, "modules": modules, "mixed": behind_dense(config), "is_interleaved": interleaved}


def _glm4_moe_lite(config: Any) -> Difference:
    found = _latent(config)
    experts = corrected(config, config.n_routed_experts, config.n_shared_experts or 0)
    modules = found["modules"] | experts["modules"]
    mixed = [kind == "sparse" for kind in config.mlp_layer_types]
    return {**found, **experts, "modules": modules, "mixed": mixed, "is_interleaved": bool(config.rope_interleave)}


def _minicpm3(config: Any) -> Difference:
    found = _latent(config)
    return {
        **found,
        "biases": found["biases"] | biases_of(config, "mlp_bias"),
        "embedding_scale": config.scale_emb,
        "residual_scale": config.scale_depth / config.num_hidden_layers**0.5,
        "logit_scale": config.dim_model_base / config.hidden_size,
    }


LATENT_FAMILIES: Mapping[str, Callable[[Any], Difference]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe_lite": _glm4_moe_lite,
    "minicpm3": _minicpm3,
}
