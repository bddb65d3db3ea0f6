"""How Gemma 4 differs from Llama: heads of its layers of full attention have another width."""

from __future__ import annotations

from typing import Any

from forerun.models.fused.expert_families import mlp
from forerun.models.fused.llama_families import SANDWICH
from forerun.models.fused.options import Difference, biases_of, head_shape
from forerun.models.fused.parts import EXPERT, Experts
from forerun.models.fused.spec import FEED, HEAD_NORMS, LLAMA_MODULES

_MIXTURE = {
    **dict.fromkeys(FEED),
    **mlp("mlp"),
    "expert_norm": "pre_feedforward_layernorm_2",
    "shared_norm": "post_feedforward_layernorm_1",
    "mixed_norm": "post_feedforward_layernorm_2",
}
"""Modules of a layer whose experts stand beside its own feed-forward layer."""


def gemma4(config: Any) -> Difference:
    """Return how Gemma 4 differs."""
    if config.hidden_size_per_layer_input or config.num_kv_shared_layers:
        raise ValueError("layers have inputs of their own, or keys of others")
    mixture = {"experts": _experts(config)} if config.enable_moe_block else {}
    modules: dict[str, str | None] = {**SANDWICH, **HEAD_NORMS, **(_MIXTURE if mixture else {})}
    layers = [_layer(config, index, modules) for index in range(config.num_hidden_layers)]
    return {
        "heads": head_shape(config.per_layer_config[config.layer_types[0]]),
        "by_layer": layers,
        "modules": modules,
        "biases": biases_of(config, "attention_bias"),
        "norms_values": True,
        "scale": 1.0,
        "layer_scale": "layer_scalar",
        "embedding_scale": config.hidden_size**0.5,
        "logit_softcap": config.final_logit_softcapping,
        **mixture,
    }


def _layer(config: Any, index: int, modules: dict[str, str | None]) -> dict[str, Any]:
    """Return what is otherwise in a layer than in the first."""
    kind = config.layer_types[index]
    _, kv_heads, width = shape = head_shape(config.per_layer_config[kind])
    differing: dict[str, Any] = {}
    if shape != head_shape(config.per_layer_config[config.layer_types[0]]):
        differing = {"num_kv_heads": kv_heads, "head_dim": width, "rotated": width}
    if config.attention_k_eq_v and kind != "sliding_attention":
        named = {**LLAMA_MODULES, **modules, "value": None}
        differing["modules"] = {role: each for role, each in named.items() if each is not None}
    return {"differing": tuple(differing.items())}


def _experts(config: Any) -> Experts:
    return Experts(
        config.num_experts,
        config.top_k_experts,
        config.moe_intermediate_size,
        router="router.proj",
        modules={role: f"experts.{{}}.{role[7:]}_proj" for role in EXPERT},
        stacked="experts",
        shared_width=config.intermediate_size,
        router_norm="router.scale",
        share_scales="router.per_expert_scale",
    )
