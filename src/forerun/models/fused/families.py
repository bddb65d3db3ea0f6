"""The families that the fused decoder computes, each by how it differs from Llama.

To add one, write a function of its configuration, and add it to FAMILIES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from forerun.models.fused.spec import ATTENTION, FEED, HEAD_NORMS, LLAMA_MODULES, QKV, ROLES, DecoderSpec, LayerSpec

_SANDWICH = {
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
ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
    "relu": "relu",
    "xielu": "xielu",
}
"""Transformers' names of activations, and ours."""


_ACTIVATION_OPTIONS = ("hidden_act", "hidden_activation", "activation_function", "activation")
_NO_ROTATION = {"rope_type": "default", "rope_theta": 10000.0}
"""Of a configuration without rotations, of which no layer has any."""
Difference = dict[str, Any]
"""Fields of `DecoderSpec` that differ from Llama's; in "modules", a role that is None is left out. Besides: "turned",
which layers rotate; "rotated_share", the part of each head that is; and "unserved", options that are not described."""


def head_shape(config: Any) -> tuple[int, int, int]:
    """Return the query heads, the key heads, and the width of a head."""
    heads: int = config.num_attention_heads
    width: int = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
    return heads, getattr(config, "num_key_value_heads", None) or heads, width


def layer_windows(config: Any) -> list[int | None]:
    """Return the sliding window of each layer."""
    num_layers: int = config.num_hidden_layers
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return [window if kind == "sliding_attention" else None for kind in layer_types]
    return [window] * num_layers


def spec_of(config: Any) -> DecoderSpec:
    """Return the decoder of a configuration of one of FAMILIES."""
    difference = FAMILIES[config.model_type](config)
    heads, kv_heads, width = head_shape(config)
    kv_heads = difference.pop("num_kv_heads", kv_heads)
    modules = {**LLAMA_MODULES, **difference.pop("modules", {})}
    difference.pop("unserved", None)
    windows, rope = layer_windows(config), getattr(config, "rope_parameters", None) or _NO_ROTATION
    turned = difference.pop("turned", [True] * len(windows))
    kinds = getattr(config, "layer_types", None) or [""] * len(windows)
    by_kind = {kind: rope[kind] for kind in dict.fromkeys(kinds) if isinstance(rope.get(kind), Mapping)}
    places = {kind: place for place, kind in enumerate(by_kind)}
    layers = tuple(
        LayerSpec(window, places.get(kind, 0) if is_turned else None)
        for window, kind, is_turned in zip(windows, kinds, turned, strict=True)
    )
    share = difference.pop("rotated_share", 1.0)
    return DecoderSpec(
        **{
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": width,
            "hidden": config.hidden_size,
            "intermediate": getattr(config, "intermediate_size", None),
            "layers": layers,
            "rotations": tuple(by_kind.items()) or ((None, rope),),
            "rotated": int(width * share),
            "scale": width**-0.5,
            "eps": getattr(config, "rms_norm_eps", None) or 0.0,
            "modules": {role: name for role, name in modules.items() if name is not None},
            "activation": ACTIVATIONS.get(_activation(config) or "silu", ""),
            **difference,
        }
    )


def _activation(config: Any) -> str | None:
    """Return the name of a configuration's activation."""
    return next((found for name in _ACTIVATION_OPTIONS if (found := getattr(config, name, None))), None)


def frequencies(config: Any, spec: DecoderSpec) -> list[tuple[Tensor, float]]:
    """Return each rotation's inverse frequencies, [rotated / 2] float32, and the factor of its cosines and sines, as
    Transformers computes them."""
    found = []
    for kind, rope in spec.rotations:
        if rope["rope_type"] == "default":
            powers = torch.arange(0, spec.rotated, 2, dtype=torch.float) / spec.rotated
            found.append((1.0 / (rope["rope_theta"] ** powers), 1.0))
        else:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            options = {} if kind is None else {"layer_type": kind}
            found.append(ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, **options))
    return found


def _biases(config: Any, *names: str) -> frozenset[str]:
    """Return the roles with biases, by the options of a configuration that say so."""
    roles = {"attention_bias": ATTENTION, "mlp_bias": FEED, "use_bias": ATTENTION | FEED, "use_qkv_bias": QKV}
    return frozenset().union(*(roles[name] for name in names if getattr(config, name, False)))


def _share(config: Any) -> float:
    """Return the part of each head that is rotated."""
    return float(config.rope_parameters.get("partial_rotary_factor") or 1.0)


def _llama(config: Any) -> Difference:
    return {"biases": _biases(config, "attention_bias", "mlp_bias")}


def _qwen2(config: Any) -> Difference:
    return {"biases": QKV}


def _qwen3(config: Any) -> Difference:
    return {"modules": HEAD_NORMS, "biases": _biases(config, "attention_bias")}


def _gemma(config: Any) -> Difference:
    scale = config.hidden_size**0.5
    return {"norm_offset": 1.0, "embedding_scale": scale, "biases": _biases(config, "attention_bias")}


def _gemma2(config: Any) -> Difference:
    return {
        **_gemma(config),
        "modules": _SANDWICH,
        "activation": ACTIVATIONS.get(config.hidden_activation, ""),
        "scale": config.query_pre_attn_scalar**-0.5,
        "softcap": config.attn_logit_softcapping,
        "logit_softcap": config.final_logit_softcapping,
    }


def _gemma3(config: Any) -> Difference:
    return {**_gemma2(config), "modules": _SANDWICH | HEAD_NORMS}


def _phi3(config: Any) -> Difference:
    qkv, mlp = "self_attn.qkv_proj", "mlp.gate_up_proj"
    fused = {"query": qkv, "key": qkv, "value": qkv, "gate": mlp, "up": mlp}
    return {"modules": fused, "rotated_share": _share(config)}


def _granite(config: Any) -> Difference:
    return {
        "biases": _biases(config, "attention_bias", "mlp_bias"),
        "scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": 1 / config.logits_scaling,
    }


def _smollm3(config: Any) -> Difference:
    return {"biases": _biases(config, "attention_bias", "mlp_bias"), "turned": list(map(bool, config.no_rope_layers))}


def _olmo(config: Any) -> Difference:
    return {"biases": _biases(config, "attention_bias"), "norm_kind": "layer", "has_norm_weights": False, "eps": 1e-5}


def _olmo2(config: Any) -> Difference:
    return {"modules": _BEHIND | HEAD_NORMS, "biases": _biases(config, "attention_bias"), "has_wide_norms": True}


def _cohere(config: Any) -> Difference:
    return {
        "modules": {"mlp_norm": "input_layernorm"},
        "biases": _biases(config, "attention_bias"),
        "norm_kind": "layer",
        "eps": config.layer_norm_eps,
        "is_parallel": True,
        "is_interleaved": True,
        "logit_scale": config.logit_scale,
    }


def _cohere2(config: Any) -> Difference:
    return {**_cohere(config), "turned": [window is not None for window in layer_windows(config)]}


def _glm(config: Any) -> Difference:
    biases = QKV if config.attention_bias else frozenset()
    fused = {"gate": "mlp.gate_up_proj", "up": "mlp.gate_up_proj"}
    return {"modules": fused, "biases": biases, "is_interleaved": True, "rotated_share": _share(config)}


def _glm4(config: Any) -> Difference:
    found = _glm(config)
    behind = {"attention_norm": "post_self_attn_layernorm", "feed_norm": "post_mlp_layernorm"}
    return {**found, "modules": found["modules"] | behind}


def _starcoder2(config: Any) -> Difference:
    return {
        "modules": {"gate": None, "up": "mlp.c_fc", "down": "mlp.c_proj"},
        "biases": _biases(config, "use_bias") | {"norms"},
        "norm_kind": "layer",
        "eps": config.norm_epsilon,
    }


def _stablelm(config: Any) -> Difference:
    shared = {"mlp_norm": "input_layernorm"} if config.use_parallel_residual else {}
    return {
        "modules": shared,
        "biases": _biases(config, "use_qkv_bias") | {"norms"},
        "norm_kind": "layer",
        "eps": config.layer_norm_eps,
        "is_parallel": bool(config.use_parallel_residual),
        "rotated_share": _share(config),
    }


def _nemotron(config: Any) -> Difference:
    return {
        "modules": {"gate": None},
        "biases": _biases(config, "attention_bias", "mlp_bias") | {"norms"},
        "norm_kind": "layer",
        "norm_offset": 1.0,
        "eps": config.norm_eps,
        "rotated_share": _share(config),
    }


def _exaone4(config: Any) -> Difference:
    windows = layer_windows(config)
    turned = [config.sliding_window is None or window is not None for window in windows]
    return {"modules": _BEHIND | HEAD_NORMS, "turned": turned}


def _phi(config: Any) -> Difference:
    names = {"out": "self_attn.dense", "gate": None, "up": "mlp.fc1", "down": "mlp.fc2", "mlp_norm": "input_layernorm"}
    return {
        "modules": names,
        "biases": ATTENTION | FEED | {"norms", "head"},
        "norm": "final_layernorm",
        "norm_kind": "layer",
        "eps": config.layer_norm_eps,
        "is_parallel": True,
        "rotated_share": _share(config),
    }


def _gpt_neox(config: Any) -> Difference:
    qkv = "attention.query_key_value"
    names = {"query": qkv, "key": qkv, "value": qkv, "out": "attention.dense"}
    feed = {"gate": None, "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
    return {
        "num_kv_heads": config.num_attention_heads,
        "qkv_groups": config.num_attention_heads,
        "head_dim": config.hidden_size // config.num_attention_heads,
        "scale": (config.hidden_size // config.num_attention_heads) ** -0.5,
        "modules": names | feed,
        "biases": FEED | {"norms"} | _biases(config, "attention_bias"),
        "base": "gpt_neox",
        "embedding": "embed_in",
        "norm": "final_layer_norm",
        "norm_kind": "layer",
        "eps": config.layer_norm_eps,
        "is_parallel": bool(config.use_parallel_residual),
        "rotated_share": _share(config),
    }


def _seed_oss(config: Any) -> Difference:
    out = {"out"} if config.attention_out_bias else set()
    return {"biases": (QKV if config.attention_bias else frozenset()) | out | _biases(config, "mlp_bias")}


def _arcee(config: Any) -> Difference:
    return {"modules": {"gate": None}, "biases": _biases(config, "attention_bias", "mlp_bias")}


def _ernie4_5(config: Any) -> Difference:
    return {"biases": _biases(config, "use_bias"), "is_interleaved": True}


def _helium(config: Any) -> Difference:
    return {**_llama(config), "is_interleaved": True}


def _hunyuan(config: Any) -> Difference:
    norms = {"query_norm": "self_attn.query_layernorm", "key_norm": "self_attn.key_layernorm"}
    return {"modules": norms, "biases": _biases(config, "attention_bias"), "norms_rotated": True}


def _ministral3(config: Any) -> Difference:
    rope = config.rope_parameters
    growth, period = rope.get("llama_4_scaling_beta") or 0.0, rope.get("original_max_position_embeddings") or 1
    return {"query_growth": growth, "query_period": int(period)}


def _gpt2(config: Any) -> Difference:
    qkv, norm = "attn.c_attn", {"input_norm": "ln_1", "mlp_norm": "ln_2"}
    feed = {"gate": None, "up": "mlp.c_fc", "down": "mlp.c_proj"}
    _, _, width = head_shape(config)
    return {
        "modules": {"query": qkv, "key": qkv, "value": qkv, "out": "attn.c_proj"} | norm | feed,
        "is_transposed": True,
        "biases": ATTENTION | FEED | {"norms"},
        "base": "transformer",
        "embedding": "wte",
        "positions": "wpe",
        "layer_list": "h",
        "norm": "ln_f",
        "norm_kind": "layer",
        "eps": config.layer_norm_epsilon,
        "intermediate": config.n_inner or 4 * config.hidden_size,
        "scale": width**-0.5 if config.scale_attn_weights else 1.0,
        "turned": [False] * config.num_hidden_layers,
        "unserved": [] if not config.add_cross_attention else ["add_cross_attention"],
    }


def _gpt_bigcode(config: Any) -> Difference:
    # its attention of several key heads has each head's query, key and value side by side
    heads, kv_heads = config.num_attention_heads, 1 if config.multi_query else config.num_attention_heads
    groups = 1 if config.multi_query else heads
    return {**_gpt2(config), "is_transposed": False, "num_kv_heads": kv_heads, "qkv_groups": groups}


def _opt(config: Any) -> Difference:
    names = {"out": "self_attn.out_proj", "gate": None, "up": "fc1", "down": "fc2"}
    needed = ("do_layer_norm_before", "layer_norm_elementwise_affine")
    unserved = [name for name in needed if not getattr(config, name)]
    unserved += ["_remove_final_layer_norm"] if config._remove_final_layer_norm else []
    return {
        "modules": names | {"input_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"},
        "biases": {"norms"} | (ATTENTION | FEED if config.enable_bias else frozenset()),
        "base": "model.decoder",
        "positions": "embed_positions",
        "first_position": 2,
        "norm": "final_layer_norm",
        "norm_kind": "layer",
        "eps": 1e-5,
        "intermediate": config.ffn_dim,
        "turned": [False] * config.num_hidden_layers,
        "unserved": unserved + (["word_embed_proj_dim"] if config.word_embed_proj_dim != config.hidden_size else []),
    }


def _biogpt(config: Any) -> Difference:
    names = {"out": "self_attn.out_proj", "gate": None, "up": "fc1", "down": "fc2"}
    return {
        "modules": names | {"input_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"},
        "biases": ATTENTION | FEED | {"norms"},
        "base": "biogpt",
        "positions": "embed_positions",
        "first_position": 2,
        "norm": "layer_norm",
        "head": "output_projection",
        "norm_kind": "layer",
        "eps": config.layer_norm_eps,
        "embedding_scale": config.hidden_size**0.5 if config.scale_embedding else 1.0,
        "turned": [False] * config.num_hidden_layers,
    }


def _apertus(config: Any) -> Difference:
    norms = {"input_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}
    biases, curve = _biases(config, "attention_bias"), "mlp.act_fn" if config.hidden_act == "xielu" else None
    return {"modules": {"gate": None} | norms | HEAD_NORMS, "biases": biases, "curve": curve}


def _falcon(config: Any) -> Difference:
    heads, is_new, qkv = config.num_attention_heads, config.new_decoder_architecture, "self_attention.query_key_value"
    kv_heads = config.num_kv_heads if is_new else 1 if config.multi_query else heads
    norms = {"mlp_norm": "input_layernorm"} if config.parallel_attn else {}
    if is_new and config.num_ln_in_parallel_attn in (None, 2):
        norms = {"input_norm": "ln_attn", "mlp_norm": "ln_mlp"}
    return {
        "num_kv_heads": kv_heads,
        "qkv_groups": kv_heads,
        "modules": {"query": qkv, "key": qkv, "value": qkv, "out": "self_attention.dense"}
        | {"gate": None, "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
        | norms,
        "biases": {"norms"} | (ATTENTION | FEED if config.bias else frozenset()),
        "base": "transformer",
        "embedding": "word_embeddings",
        "layer_list": "h",
        "norm": "ln_f",
        "norm_kind": "layer",
        "eps": config.layer_norm_epsilon,
        "intermediate": config.ffn_hidden_size,
        "is_parallel": bool(config.parallel_attn),
        "unserved": ["alibi"] if config.alibi else ["parallel_attn"] if is_new and not config.parallel_attn else [],
    }


def _granitemoehybrid(config: Any) -> Difference:
    gate_up, is_turned = "shared_mlp.input_linear", config.position_embedding_type == "rope"
    return {
        **_granite(config),
        "modules": {"gate": gate_up, "up": gate_up, "down": "shared_mlp.output_linear"},
        "intermediate": config.shared_intermediate_size,
        "turned": [is_turned] * config.num_hidden_layers,
        "unserved": ["num_local_experts"] if config.num_local_experts else [],
    }


def _vaultgemma(config: Any) -> Difference:
    return {**_gemma2(config), "modules": {"mlp_norm": "pre_feedforward_layernorm"}}


def _jais2(config: Any) -> Difference:
    biases = _biases(config, "attention_bias", "mlp_bias") | {"norms"}
    return {"modules": {"gate": None}, "biases": biases, "norm_kind": "layer", "eps": config.layer_norm_eps}


def _gptj(config: Any) -> Difference:
    _, _, width = head_shape(config)
    norms = {"input_norm": "ln_1", "mlp_norm": "ln_1"}
    return {
        "modules": {role: f"attn.{name}_proj" for role, name in zip(ROLES, ("q", "k", "v", "out"), strict=False)}
        | {"gate": None, "up": "mlp.fc_in", "down": "mlp.fc_out"}
        | norms,
        "biases": FEED | {"norms", "head"},
        "base": "transformer",
        "embedding": "wte",
        "layer_list": "h",
        "norm": "ln_f",
        "norm_kind": "layer",
        "eps": config.layer_norm_epsilon,
        "intermediate": config.n_inner or 4 * config.hidden_size,
        "is_parallel": True,
        "is_interleaved": True,
        "rotated_share": (config.rotary_dim or width) / width,
        "unserved": [] if config.rotary_dim else ["rotary_dim"],
    }


_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
_UNSERVED = ("use_qk_norm", "qk_layernorm", "clip_qkv", "use_bidirectional_attention", "scale_attn_by_inverse_layer_idx")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")


def refusal(config: Any) -> str | None:
    """Return the reason why no entry describes a Transformers configuration; None if one does."""
    model_type = getattr(config, "model_type", None)
    if model_type not in FAMILIES:
        return f"model type {model_type!r} is not one of {', '.join(FAMILIES)}"
    unserved = [option for option in _UNSERVED if getattr(config, option, None)]
    for option in (*unserved, *FAMILIES[model_type](config).get("unserved", ())):
        return f"{option}={getattr(config, option)!r}"
    if foreign := set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES:
        return f"layers of type {', '.join(sorted(foreign))}"
    spec = spec_of(config)
    for _, rope in spec.rotations:
        # longrope has factors for short and for long contexts
        kind = rope.get("rope_type", "default")
        if kind not in _ROPE_TYPES or rope.get("short_factor") != rope.get("long_factor"):
            return f"rope type {kind!r} depends on the sequence's length"
        share = rope.get("partial_rotary_factor") or 1.0
        if kind != "default" and int(spec.head_dim * share) != spec.rotated:  # Llama's default type does not read it
            return f"a rotation of {share} of each head"
    if spec.head_dim % 2 or spec.rotated % 2 or spec.num_heads % max(1, spec.num_kv_heads):
        return f"{spec.num_heads} query heads and {spec.num_kv_heads} key heads of width {spec.head_dim}"
    if not spec.activation:
        return f"activation {_activation(config)!r}"
    if len({layer.window for layer in spec.layers} - {None}) > 1:
        return "windows of several widths"
    return None


FAMILIES: Mapping[str, Callable[[Any], Difference]] = {
    "apertus": _apertus,
    "arcee": _arcee,
    "biogpt": _biogpt,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "ernie4_5": _ernie4_5,
    "exaone4": _exaone4,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm": _glm,
    "glm4": _glm4,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "granite": _granite,
    "granitemoehybrid": _granitemoehybrid,
    "helium": _helium,
    "hunyuan_v1_dense": _hunyuan,
    "jais2": _jais2,
    "llama": _llama,
    "ministral": lambda config: {},
    "ministral3": _ministral3,
    "mistral": lambda config: {},
    "nemotron": _nemotron,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmo3": _olmo2,
    "opt": _opt,
    "phi": _phi,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "vaultgemma": _vaultgemma,
}
"""How each family differs from Llama, by Transformers' model type."""
