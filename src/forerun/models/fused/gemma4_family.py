"""How Gemma 4 differs from Llama: heads of its layers of full attention have another width."""

from __future__ import annotations

from typing import Any

from forerun.models.fused.expert_families import mlp
from forerun.models.fused.llama_families import SANDWICH
from forerun.models.fused.options import Difference, biases_of, head_shape
from forerun.models.spec.attention import HEAD_NORMS
from forerun.models.spec.decoder import PerLayerInputs
from forerun.models.spec.feed_forward import EXPERT, FEED, Experts

_MIXTURE = {
    **dict.fromkeys(FEED),
    **mlp("mlp"),
    "expert_norm": "pre_feedforward_layernorm_2",
    "shared_norm": "post_feedforward_layernorm_1",
    "routed_norm": "post_feedforward_layernorm_2",
}
"""Modules of a layer whose experts stand beside its own feed-forward layer."""
_OF_TOKENS = {
    "per_layer_input_gate": "per_layer_input_gate",
    "per_layer_projection": "per_layer_projection",
    "post_per_layer_input_norm": "post_per_layer_input_norm",
}


def gemma4(config: Any) -> Difference:
    """Return how Gemma 4 differs."""
    mixture: Difference = {"experts": _experts(config)} if config.enable_moe_block else {}
    modules: dict[str, Any] = {**SANDWICH, **HEAD_NORMS, **(_MIXTURE if mixture else {})}
    inputs: Difference = {}
    if width := config.hidden_size_per_layer_input:
        modules |= _OF_TOKENS
        names = "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"
        inputs = {"per_layer": PerLayerInputs(width, config.vocab_size_per_layer_input, *names)}
    layers = [_layer(config, index, modules) for index in range(config.num_hidden_layers)]
    return {
        "heads": head_shape(config.per_layer_config[config.layer_types[0]]),
        "by_layer": layers,
        "modules": modules,
        "biases": biases_of(config, "attention_bias"),
        "norms_values": True,
        "scale": 1.0,
        "scalar": "layer_scalar",
        "embedding_scale": config.hidden_size**0.5,
        "logit_softcap": config.final_logit_softcapping,
        **mixture,
        **inputs,
    }


def _layer(config: Any, index: int, modules: dict[str, Any]) -> Difference:
    """Return what is otherwise in a layer than in the first. Layers from some on read the keys and values of the last
    layer of their type before these."""
    kind = config.layer_types[index]
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    _, kv_heads, width = shape = head_shape(config.per_layer_config[kind])
    differing: Difference = {}
    if shape != head_shape(config.per_layer_config[config.layer_types[0]]):
        differing = {"num_kv_heads": kv_heads, "head_dim": width, "rotated": width}
    lacking = {"value"} if config.attention_k_eq_v and kind != "sliding_attention" else set()
    keys_of = None
    if index >= first_shared:
        keys_of = max(other for other in range(first_shared) if config.layer_types[other] == kind)
        lacking = {"key", "value", "key_norm"}
        differing |= {"intermediate": 2 * config.intermediate_size} if config.use_double_wide_mlp else {}
    if lacking:
        differing["modules"] = {**modules, **dict.fromkeys(lacking)}
    return {**differing, "keys_of": keys_of}


def _experts(config: Any) -> Experts:
    if config.use_double_wide_mlp and config.num_kv_shared_layers:
        raise ValueError("feed-forward layers of several widths beside experts")
    return Experts(
        num_experts=config.num_experts,
        num_experts_per_tok=config.top_k_experts,
        moe_intermediate_size=config.moe_intermediate_size,
        router="router.proj",
        experts={role: f"experts.{{}}.{role[7:]}_proj" for role in EXPERT},
        stacked="experts",
        shared_intermediate_size=config.intermediate_size,
        router_norm="router.scale",
        per_expert_scale="router.per_expert_scale",
    )
