"""How the families that are made like Llama differ from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forerun.models.fused.options import ACTIVATIONS, Difference, biases_of, head_shape, layer_windows, rotated_share
from forerun.models.spec.attention import HEAD_NORMS, QKV

SANDWICH = {
    "attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "feed_norm": "post_feedforward_layernorm",
}
_BEHIND = {
    "input_norm": None,
    "mlp_norm": None,
    "attention_norm": "post_attention_layernorm",
    "feed_norm": "post_feedforward_layernorm",
}


def _llama(config: Any) -> Difference:
    return {"biases": biases_of(config, "attention_bias", "mlp_bias")}


def _gemma(config: Any) -> Difference:
    scale = config.hidden_size**0.5
    return {"norm_offset": 1.0, "embedding_scale": scale, "biases": biases_of(config, "attention_bias")}


def _gemma2(config: Any) -> Difference:
    return {
        **_gemma(config),
        "modules": SANDWICH,
        "activation": ACTIVATIONS.get(config.hidden_activation, ""),
        "scale": config.query_pre_attn_scalar**-0.5,
        "softcap": config.attn_logit_softcapping,
        "logit_softcap": config.final_logit_softcapping,
    }


def _gemma3(config: Any) -> Difference:
    # Transformers keeps a cap of its scores, and does not read it
    return {**_gemma2(config), "modules": SANDWICH | HEAD_NORMS, "softcap": None}


def _phi3(config: Any) -> Difference:
    qkv = "self_attn.qkv_proj"
    mlp = "mlp.gate_up_proj"
    fused = {"query": qkv, "key": qkv, "value": qkv, "gate": mlp, "up": mlp}
    return {"modules": fused, "rotated_share": rotated_share(config)}


def granite(config: Any) -> Difference:
    """Return how Granite differs."""
    return {
        "biases": biases_of(config, "attention_bias", "mlp_bias"),
        "scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": 1 / config.logits_scaling,
    }


def _hyperclovax(config: Any) -> Difference:
    behind = {"attention_norm": "post_norm1", "feed_norm": "post_norm2"} if config.use_post_norm else {}
    return {**granite(config), "modules": behind, "logit_scale": config.logits_scaling}


def _smollm3(config: Any) -> Difference:
    return {"biases": biases_of(config, "attention_bias", "mlp_bias"), "turned": list(map(bool, config.no_rope_layers))}


def _olmo(config: Any) -> Difference:
    return {"biases": biases_of(config, "attention_bias"), "norm_kind": "layer", "has_norm_weights": False, "eps": 1e-5}


def _olmo2(config: Any) -> Difference:
    return {"modules": _BEHIND | HEAD_NORMS, "biases": biases_of(config, "attention_bias"), "has_wide_norms": True}


def cohere(config: Any) -> Difference:
    """Return how Cohere's Command R differs."""
    return {
        "modules": {"mlp_norm": "input_layernorm"},
        "biases": biases_of(config, "attention_bias"),
        "norm_kind": "layer",
        "eps": config.layer_norm_eps,
        "is_parallel": True,
        "unserved": ["use_qk_norm"] if getattr(config, "use_qk_norm", False) else [],
        "is_interleaved": True,
        "logit_scale": config.logit_scale,
    }


def _glm(config: Any) -> Difference:
    biases = QKV if config.attention_bias else frozenset()
    fused = {"gate": "mlp.gate_up_proj", "up": "mlp.gate_up_proj"}
    return {"modules": fused, "biases": biases, "is_interleaved": True, "rotated_share": rotated_share(config)}


def _glm4(config: Any) -> Difference:
    found = _glm(config)
    behind = {"attention_norm": "post_self_attn_layernorm", "feed_norm": "post_mlp_layernorm"}
    return {**found, "modules": found["modules"] | behind}


def _starcoder2(config: Any) -> Difference:
    return {
        "modules": {"gate": None, "up": "mlp.c_fc", "down": "mlp.c_proj"},
        "biases": biases_of(config, "use_bias") | {"norms"},
        "norm_kind": "layer",
        "eps": config.norm_epsilon,
    }


def _stablelm(config: Any) -> Difference:
    shared = {"mlp_norm": "input_layernorm"} if config.use_parallel_residual else {}
    return {
        "modules": shared,
        "biases": biases_of(config, "use_qkv_bias") | {"norms"},
        "norm_kind": "layer",
        "eps": config.layer_norm_eps,
        "is_parallel": bool(config.use_parallel_residual),
        "rotated_share": rotated_share(config),
    }


def _nanochat(config: Any) -> Difference:
    return {
        "modules": {"gate": None, "up": "mlp.fc1", "down": "mlp.fc2"} | HEAD_NORMS,
        "biases": biases_of(config, "attention_bias"),
        "has_norm_weights": False,
        "norms_rotated": True,
        "norms_embeddings": True,
        "turns_back": True,
        "logit_softcap": config.final_logit_softcapping,
    }


def _nemotron(config: Any) -> Difference:
    return {
        "modules": {"gate": None},
        "biases": biases_of(config, "attention_bias", "mlp_bias") | {"norms"},
        "norm_kind": "layer",
        "norm_offset": 1.0,
        "eps": config.norm_eps,
        "rotated_share": rotated_share(config),
    }


def _exaone4(config: Any) -> Difference:
    windows = layer_windows(config)
    turned = [config.sliding_window is None or window is not None for window in windows]
    return {"modules": _BEHIND | HEAD_NORMS, "turned": turned}


def _seed_oss(config: Any) -> Difference:
    out = {"out"} if config.attention_out_bias else set()
    return {"biases": (QKV if config.attention_bias else frozenset()) | out | biases_of(config, "mlp_bias")}


def hunyuan(config: Any) -> Difference:
    """Return how Hunyuan differs."""
    norms = {"query_norm": "self_attn.query_layernorm", "key_norm": "self_attn.key_layernorm"}
    found: Difference = {"modules": norms, "biases": biases_of(config, "attention_bias"), "norms_rotated": True}
    rope = config.rope_parameters
    (_, _, width) = head_shape(config)
    if rope["rope_type"] == "dynamic" and rope.get("alpha"):  # which makes it the same at any length
        theta = rope["rope_theta"] * rope["alpha"] ** (width / (width - 2))
        found["rotations"] = ((None, {"rope_type": "default", "rope_theta": theta}),)
    return found


def _ministral3(config: Any) -> Difference:
    rope = config.rope_parameters
    growth = rope.get("llama_4_scaling_beta") or 0.0
    period = rope.get("original_max_position_embeddings") or 1
    return {"query_growth": growth, "query_period": int(period)}


def _apertus(config: Any) -> Difference:
    norms = {"input_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}
    biases = biases_of(config, "attention_bias")
    curve = "mlp.act_fn" if config.hidden_act == "xielu" else None
    return {"modules": {"gate": None} | norms | HEAD_NORMS, "biases": biases, "xielu": curve}


def _jais2(config: Any) -> Difference:
    biases = biases_of(config, "attention_bias", "mlp_bias") | {"norms"}
    return {"modules": {"gate": None}, "biases": biases, "norm_kind": "layer", "eps": config.layer_norm_eps}


LLAMA_FAMILIES: Mapping[str, Callable[[Any], Difference]] = {
    "apertus": _apertus,
    "arcee": lambda config: {"modules": {"gate": None}, "biases": biases_of(config, "attention_bias", "mlp_bias")},
    "cohere": cohere,
    "cohere2": lambda config: {**cohere(config), "turned": [window is not None for window in layer_windows(config)]},
    "ernie4_5": lambda config: {"biases": biases_of(config, "use_bias"), "is_interleaved": True},
    "exaone4": _exaone4,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm": _glm,
    "glm4": _glm4,
    "granite": granite,
    "helium": lambda config: {
        "biases": biases_of(config, "attention_bias", "mlp_bias") - {"out"},
        "is_interleaved": True,
    },
    "hunyuan_v1_dense": hunyuan,
    "hyperclovax": _hyperclovax,
    "jais2": _jais2,
    "llama": _llama,
    "ministral": lambda config: {},
    "ministral3": _ministral3,
    "mistral": lambda config: {},
    "nanochat": _nanochat,
    "nemotron": _nemotron,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmo3": _olmo2,
    "phi3": _phi3,
    "qwen2": lambda config: {"biases": QKV},
    "qwen3": lambda config: {"modules": HEAD_NORMS, "biases": biases_of(config, "attention_bias")},
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "vaultgemma": lambda config: {**_gemma2(config), "modules": {"mlp_norm": "pre_feedforward_layernorm"}},
}
