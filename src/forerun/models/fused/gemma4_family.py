"""How Gemma 4 differs from Llama: heads of its layers of full attention have another width."""

from __future__ import annotations

from typing import Any

from forerun.models.fused.expert_families import mlp
from forerun.models.fused.llama_families import SANDWICH
from forerun.models.fused.options import Difference, biases_of, head_shape
from forerun.models.fused.parts import EXPERT, Experts, TokenInputs
from forerun.models.fused.spec import FEED, HEAD_NORMS, LLAMA_MODULES

_MIXTURE = {
    **dict.fromkeys(FEED),
    **mlp("mlp"),
    "expert_norm": "pre_feedforward_layernorm_2",
    "shared_norm": "post_feedforward_layernorm_1",
    "mixed_norm": "post_feedforward_layernorm_2",
}
"""Modules of a layer whose experts stand beside its own feed-forward layer."""
_OF_TOKENS = {
    "token_gate": "per_layer_input_gate",
    "token_out": "per_layer_projection",
    "token_norm": "post_per_layer_input_norm",
}


def gemma4(config: Any) -> Difference:
    """Return how Gemma 4 differs."""
    mixture = {"experts": _experts(config)} if config.enable_moe_block else {}
    modules: dict[str, str | None] = {**SANDWICH, **HEAD_NORMS, **(_MIXTURE if mixture else {})}
    inputs = {}
    if width := config.hidden_size_per_layer_input:
        modules |= _OF_TOKENS
        names = "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"
        inputs = {"token_inputs": TokenInputs(width, config.vocab_size_per_layer_input, *names)}
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
        **inputs,
    }


def _layer(config: Any, index: int, modules: dict[str, str | None]) -> dict[str, Any]:
    """Return what is otherwise in a layer than in the first. Layers from some on read the keys and values of the last
    layer of their type before these."""
    kind, first_shared = config.layer_types[index], config.num_hidden_layers - config.num_kv_shared_layers
    _, kv_heads, width = shape = head_shape(config.per_layer_config[kind])
    differing: dict[str, Any] = {}
    if shape != head_shape(config.per_layer_config[config.layer_types[0]]):
        differing = {"num_kv_heads": kv_heads, "head_dim": width, "rotated": width}
    lacking = {"value"} if config.attention_k_eq_v and kind != "sliding_attention" else set()
    keys_of = None
    if index >= first_shared:
        keys_of = max(other for other in range(first_shared) if config.layer_types[other] == kind)
        lacking = {"key", "value", "key_norm"}
        differing |= {"intermediate": 2 * config.intermediate_size} if config.use_double_wide_mlp else {}
    if lacking:
        named = {**LLAMA_MODULES, **modules, **dict.fromkeys(lacking)}
        differing["modules"] = {role: each for role, each in named.items() if each is not None}
    return {"differing": tuple(differing.items()), "keys_of": keys_of}


def _experts(config: Any) -> Experts:
    if config.use_double_wide_mlp and config.num_kv_shared_layers:
        raise ValueError("feed-forward layers of several widths beside experts")
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
