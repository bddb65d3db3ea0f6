"""What a decoder's spec means, by names that the golden files keep. Its own names are others.

Fields that have the value of DEFAULTS are left out, so that a spec need not have fields for what a family lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from forerun.models.decoders import llama_refusal
from forerun.models.families.table import frequencies, refusal, spec_of
from forerun.models.fused.parts import state_layout
from forerun.models.loading.configuration import context_length
from forerun.models.spec.attention import LatentAttention
from forerun.models.spec.decoder import DecoderSpec
from forerun.models.spec.feed_forward import EXPERT, FeedForward
from forerun.models.spec.layer import LayerSpec
from golden.sources import digest, rounded, runs

DEFAULTS: Mapping[str, Any] = {
    "base": "model",
    "embedding": "embed_tokens",
    "layer_list": "layers",
    "norm": "norm",
    "head": "lm_head",
    "positions": None,
    "first_position": 0,
    "is_transposed": False,
    "norms_embeddings": False,
    "norm_kind": "rms",
    "norm_offset": 0.0,
    "has_norm_weights": True,
    "is_parallel": False,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "attention_scale": 1.0,
    "activation_scale": 1.0,
    "logit_scale": 1.0,
    "logit_softcap": None,
    "layer_scale": None,
    # of a layer
    "window": None,
    "keys_of": None,
    "attends": True,
    "is_recurrent": False,
    "feeds": True,
    "has_experts": False,
    "feed_scale": 1.0,
    "is_interleaved": False,
    "turns_back": False,
    "qkv_groups": 1,
    "has_wide_norms": False,
    "norms_rotated": False,
    "norms_values": False,
    "gates_heads": False,
    "softcap": None,
    "query_growth": 0.0,
    "query_period": 1,
    "sinks": None,
    "curve": None,
    # of recurrences
    "heads": 0,
    "key_heads": 1,
    "key_width": 0,
    "value_width": 0,
    "heads_are_tiled": False,
    "norm_width": 0,
    "norms_each": True,
    "gates_first": False,
    "beta_scale": 1.0,
    "step_limits": (0.0, float("inf")),
    # of experts
    "shared_width": 0,
    "shared_switch": None,
    "bias": None,
    "bias_shape": (),
    "scoring": "softmax",
    "distance": 0.0,
    "groups": 0,
    "top_groups": 0,
    "best": 2,
    "adds_to_one": True,
    "least_sum": 0.0,
    "scale": 1.0,
    "router_norm": None,
    "share_scales": None,
    "entry_width": 0,
}
_OF_MODEL: Mapping[str, str] = {
    **{name: name for name in ("hidden", "base", "layer_list", "residual_scale")},
    "eps": "norms.eps",
    "norm_kind": "norms.kind",
    "norm_offset": "norms.offset",
    "has_norm_weights": "norms.has_weights",
    "embedding": "embeddings.module",
    "embedding_scale": "embeddings.scale",
    "norms_embeddings": "embeddings.is_normed",
    "positions": "embeddings.positions",
    "first_position": "embeddings.first_position",
    "norm": "output.norm",
    "head": "output.module",
    "logit_scale": "output.scale",
    "logit_softcap": "output.softcap",
}
_OF_ATTENTION: Mapping[str, str] = {
    **{name: name for name in ("num_heads", "num_kv_heads", "head_dim", "rotated", "cached_widths", "scale")},
    **{name: name for name in ("softcap", "is_interleaved", "qkv_groups", "has_wide_norms", "norms_rotated")},
    **{name: name for name in ("norms_values", "gates_heads", "query_growth", "query_period", "sinks", "window")},
    "keys_of": "keys_of",
}
_OF_RECURRENCE: Mapping[str, str] = {
    **{
        name: name for name in ("kind", "channels", "heads", "key_heads", "key_width", "value_width", "heads_are_tiled")
    },
    **{name: name for name in ("heads_are_tiled", "order", "places", "norms_each", "gates_first", "norm_eps")},
    **{name: name for name in ("beta_scale", "scales", "unrounded")},
    "num_taps": "conv_kernel",
    "numbers": "parameters",
    "norm_width": "normed_width",
    "step_limits": "time_step_limit",
}
_OF_EXPERTS: Mapping[str, str] = {
    **{name: name for name in ("router", "stacked", "is_transposed", "bias_shape", "unrounded", "scoring", "distance")},
    **{name: name for name in ("least_sum", "router_norm")},
    "count": "num_experts",
    "top": "num_experts_per_tok",
    "width": "moe_intermediate_size",
    "modules": "experts",
    "shared_width": "shared_intermediate_size",
    "shared_switch": "shared_expert_gate",
    "bias": "e_score_correction_bias",
    "groups": "n_group",
    "top_groups": "topk_group",
    "best": "scores_of_group",
    "adds_to_one": "norm_topk_prob",
    "scale": "routed_scaling_factor",
    "curve": "swiglu",
    "share_scales": "per_expert_scale",
}
_OF_LATENTS = {"rank": "kv_lora_rank", "value_width": "v_head_dim", "entry_width": "q_lora_rank"}
_OF_LATENTS |= {"expansion": "kv_b_proj", "eps": "eps"}
_OF_TOKENS = {"width": "width", "count": "vocab_size", "table": "table", "product": "product", "norm": "norm"}
"""Name in the golden files -> attribute."""
_ROLES = {
    "q_a_proj": "entry",
    "q_a_layernorm": "entry_norm",
    "kv_a_proj": "latent",
    "kv_a_layernorm": "latent_norm",
    "per_layer_input_gate": "token_gate",
    "per_layer_projection": "token_out",
    "post_per_layer_input_norm": "token_norm",
    "routed_norm": "mixed_norm",
    "in_proj_qkv": "mixed",
    "in_proj_k": "mixed_key",
    "in_proj_v": "mixed_value",
    "in_proj_z": "mixed_gate",
    "in_proj_b": "beta",
    "in_proj_a": "decay",
    "out_proj": "mixed_out",
    "conv1d": "taps",
    "A_log": "rate",
    "dt_bias": "step_bias",
    "D": "skip",
}
"""Roles and parameters by other names in the golden files."""


def of_config(config: Any) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return what a configuration of Transformers describes: the model, and each layer."""
    reason = refusal(config)
    if reason is not None:
        # what Python says of a value is no promise
        return {"refused": reason.partition(": ")[0] if "describe no" in reason else reason}, []
    spec = spec_of(config)
    model = {
        "context": str(context_length(config)),
        "llama": str(llama_refusal(config) is None),
        **_model(config, spec),
    }
    for place, (inverse, factor) in enumerate(frequencies(config, spec)):
        ends = f"{inverse[0]:.4e} to {inverse[-1]:.4e}" if len(inverse) else "none"
        model[f"frequencies.{place}"] = f"{len(inverse)}, {ends}, {rounded(inverse)}, factor {factor:.6g}"
    return model, [_layer(spec, own) for own in spec.layers]


def _model(config: Any, spec: DecoderSpec) -> dict[str, str]:
    found = _plain(spec, _OF_MODEL) | _common(spec)
    for place, each in enumerate(spec.ropes):
        values = ", ".join(f"{key} {each.parameters[key]!r}" for key in sorted(each.parameters))
        found[f"rotations.{place}"] = f"{each.layer_type or 'all'}: {values}"
    if biases := _outer_biases(spec):
        found["biases"] = ", ".join(biases)
    if spec.renamed:
        found["renamed"] = ", ".join(f"{theirs} {ours}" for theirs, ours in sorted(spec.renamed.items()))
    latent = spec.attention if isinstance(spec.attention, LatentAttention) else None
    recurrence = spec.recurrence
    found |= _of_part("recurrence", recurrence, _OF_RECURRENCE) | _of_part("experts", spec.experts, _OF_EXPERTS)
    found |= _of_part("latent", latent, _OF_LATENTS)
    found |= _of_part("token_inputs", spec.embeddings.per_layer, _OF_TOKENS)
    places = ["-" if own.attention is None else spec.cached(index) for index, own in enumerate(spec.layers)]
    found["cached"] = " ".join(map(str, places)) if len(places) <= 8 else f"{len(places)} by {_hashed(places)}"
    if states := state_layout(spec):
        found["states"] = f"{states.nbytes} bytes"
    matrices = spec.matrices()
    found["matrices"] = f"{len(matrices)}, {_hashed(matrices)}"
    if spec.unread:
        found["unread"] = f"{len(spec.unread)}, {_hashed(spec.unread)}"
    return found


def _common(spec: DecoderSpec) -> dict[str, str]:
    """Return what all layers of a model have in common."""
    found = dict[str, str]()
    for own in spec.layers:
        found |= _plain(own, {"is_parallel": "is_parallel", "is_transposed": "is_transposed", "layer_scale": "scalar"})
        found |= _plain(own.attention, {"attention_scale": "out_scale"})
        found |= _plain(own.feed_forward, {"activation_scale": "activation_scale"})
    return found


def _outer_biases(spec: DecoderSpec) -> list[str]:
    there = {
        "norms": spec.norms.has_biases,
        "head": spec.output.has_bias,
        "router": spec.experts is not None and "router" in spec.experts.biases,
        "taps": spec.recurrence is not None and spec.recurrence.has_conv_bias,
    }
    return [name for name, has in there.items() if has]


def _layer(spec: DecoderSpec, own: LayerSpec) -> dict[str, str]:
    attention, feed_forward = own.attention, own.feed_forward
    has = {
        "attends": attention is not None,
        "is_recurrent": own.recurrence is not None,
        "feeds": feed_forward is not None,
        "has_experts": own.experts is not None,
    }
    found = {name: str(value) for name, value in has.items() if value != DEFAULTS[name]}
    if attention is not None:
        found |= _plain(attention, _OF_ATTENTION) | {"rotation": str(attention.rope)}
        found |= {"turns_back": "True"} if any(rope.turns_back for rope in spec.ropes) else {}
    if feed_forward is not None:
        found |= {"activation": feed_forward.activation, **_plain(feed_forward, {"feed_scale": "out_scale"})}
    if isinstance(feed_forward, FeedForward):
        found |= {"intermediate": str(feed_forward.intermediate_size), **_plain(feed_forward, {"curve": "xielu"})}
    for role in (*own.roles, *(EXPERT if own.experts is not None else ())):
        found[f"linear {_ROLES.get(role, role)}"] = _linear(own, role)
    for role in own.all_norms:
        orders = [own.norm_order(role, in_pairs=in_pairs) for in_pairs in (False, True)]
        found[f"norm {_ROLES.get(role, role)}"] = f"{own.module(role)} {own.norm_width(role)}{_orders(orders)}"
    return found


def _linear(own: LayerSpec, role: str) -> str:
    module = own.module(role).replace("experts.0.", "experts.*.")
    bias = " bias" if role in own.biases else ""
    orders = [own.part_of(role).rows(role, in_pairs=in_pairs) for in_pairs in (False, True)]
    return f"{module} {own.out_features(role)}x{own.in_features(role)}{bias}{_orders(orders)}"


def _orders(orders: Iterable[Any]) -> str:
    """Return which rows the native decoder and the one in PyTorch take, where they are not all in order."""
    native, reference = ("all" if order is None else runs(order) for order in orders)
    if native == reference:
        return "" if native == "all" else f" rows {native}"
    return f" rows {native}, reference {reference}"


def _of_part(name: str, part: Any, wanted: Mapping[str, str]) -> dict[str, str]:
    return {f"{name}.{key}": text for key, text in _plain(part, wanted).items()}


def _plain(part: Any, wanted: Mapping[str, str]) -> dict[str, str]:
    """Return the attributes that a part has, and that have another value than the default. wanted: as _OF_MODEL."""
    found = {}
    for name, path in wanted.items():
        value = part
        for attribute in path.split("."):
            value = getattr(value, attribute, DEFAULTS.get(name))
        if part is not None and (name not in DEFAULTS or value != DEFAULTS[name]):
            found[name] = _text(value)
    return found


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        named = {_ROLES.get(key, key): each for key, each in value.items()}
        return ", ".join(f"{key} {_text(named[key])}" for key in sorted(named)) or "none"
    if isinstance(value, frozenset | set):
        return ", ".join(sorted(_ROLES.get(each, each) for each in value)) or "none"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(_text, value)) + ")"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _hashed(values: Iterable[Any]) -> str:
    found = list(map(str, values))
    return digest(" ".join(sorted(found) if not isinstance(values, list) else found).encode())
