"""What a decoder's spec means, by names that the golden files keep. Another spec is told here in the same names.

Fields that have the value of DEFAULTS are left out, so that a spec need not have fields for what a family lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from forerun.models.decoders import llama_refusal
from forerun.models.fused.families import frequencies, refusal, spec_of
from forerun.models.fused.parts import EXPERT
from forerun.models.fused.recurrence import state_layout
from forerun.models.loading.configuration import context_length
from golden.names import golden_name
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
_OF_MODEL = (
    *("hidden", "eps", "base", "embedding", "layer_list", "norm", "head", "positions", "first_position"),
    *("is_transposed", "norms_embeddings", "norm_kind", "norm_offset", "has_norm_weights", "is_parallel"),
    *("embedding_scale", "residual_scale", "attention_scale", "activation_scale", "logit_scale", "logit_softcap"),
    "layer_scale",
)
_OF_LAYER = ("window", "attends", "is_recurrent", "feeds", "has_experts", "feed_scale")
_OF_ATTENTION = (
    *("num_heads", "num_kv_heads", "head_dim", "rotated", "cached_widths", "scale", "softcap", "is_interleaved"),
    *("turns_back", "qkv_groups", "has_wide_norms", "norms_rotated", "norms_values", "gates_heads", "query_growth"),
    *("query_period", "sinks"),
)
_PARTS = ("recurrence", "experts", "latent", "token_inputs")
_OUTER_BIASES = ("norms", "head", "router", "taps")


def of_config(config: Any) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return what a configuration of Transformers describes: the model, and each layer."""
    reason = refusal(config)
    if reason is not None:
        # what Python says of a value is no promise
        return {"refused": reason.partition(": ")[0] if "describe no" in reason else reason}, []
    spec = spec_of(config)
    model = {"context": str(context_length(config)), "llama": str(llama_refusal(config) is None), **_model(spec)}
    for place, (inverse, factor) in enumerate(frequencies(config, spec)):
        ends = f"{inverse[0]:.4e} to {inverse[-1]:.4e}" if len(inverse) else "none"
        model[f"frequencies.{place}"] = f"{len(inverse)}, {ends}, {rounded(inverse)}, factor {factor:.6g}"
    return model, [_layer(spec, own) for own in spec.layers]


def _model(spec: Any) -> dict[str, str]:
    found = _plain(spec, _OF_MODEL)
    for place, (kind, rope) in enumerate(spec.rotations):
        found[f"rotations.{place}"] = f"{kind or 'all'}: " + ", ".join(f"{key} {rope[key]!r}" for key in sorted(rope))
    if biases := [name for name in _OUTER_BIASES if name in spec.biases]:
        found["biases"] = ", ".join(biases)
    if spec.renamed:
        found["renamed"] = ", ".join(f"{theirs} {ours}" for theirs, ours in sorted(spec.renamed.items()))
    for part in _PARTS:
        found |= _of_part(part, getattr(spec, part))
    places = [spec.cached(index) if own.attends else "-" for index, own in enumerate(spec.layers)]
    found["cached"] = " ".join(map(str, places)) if len(places) <= 8 else f"{len(places)} by {_hashed(places)}"
    if states := state_layout(spec):
        found["states"] = f"{states.nbytes} bytes"
    matrices = spec.matrices()
    found["matrices"] = f"{len(matrices)}, {_hashed(matrices)}"
    if spec.unread:
        found["unread"] = f"{len(spec.unread)}, {_hashed(spec.unread)}"
    return found


def _layer(spec: Any, own: Any) -> dict[str, str]:
    each, roles = spec.within(own), spec.roles(own)
    found = _plain(own, _OF_LAYER)
    if own.keys_of is not None:
        found["keys_of"] = str(own.keys_of)
    if own.attends:
        found |= _plain(each, _OF_ATTENTION)
        found["rotation"] = str(own.rotation)
    if own.feeds:
        found |= {"activation": each.activation} | _plain(each, ("curve",))
        found |= {} if own.has_experts else {"intermediate": str(each.intermediate)}
    for role in roles:
        found[f"linear {role}"] = _linear(each, role)
    if own.has_experts:
        for role in EXPERT:
            found[f"linear {role}"] = _linear(each, role)
    for role in spec.norms(own):
        orders = [each.norm_order(role, in_pairs=in_pairs) for in_pairs in (False, True)]
        found[f"norm {role}"] = f"{each.modules[role]} {each.norm_width(role)}{_orders(orders)}"
    return found


def _linear(spec: Any, role: str) -> str:
    module = spec.module(role).replace("experts.0.", "experts.*.")
    bias = " bias" if role in spec.biases else ""
    orders = [spec.rows(role, in_pairs=in_pairs) for in_pairs in (False, True)]
    return f"{module} {spec.out_features(role)}x{spec.in_features(role)}{bias}{_orders(orders)}"


def _orders(orders: Iterable[Any]) -> str:
    """Return which rows the native decoder and the one in PyTorch take, where they are not all in order."""
    native, reference = ("all" if order is None else runs(order.tolist()) for order in orders)
    if native == reference:
        return "" if native == "all" else f" rows {native}"
    return f" rows {native}, reference {reference}"


def _of_part(name: str, part: Any) -> dict[str, str]:
    if part is None:
        return {}
    return {f"{name}.{key}": text for key, text in _plain(part, [field.name for field in fields(part)]).items()}


def _plain(thing: Any, wanted: Iterable[str]) -> dict[str, str]:
    """Return the fields that have another value than the default."""
    of = f"spec.{type(thing).__name__}" if is_dataclass(thing) else "spec"
    found = {}
    for name in wanted:
        value = getattr(thing, name)
        if name not in DEFAULTS or value != DEFAULTS[name]:
            found[golden_name(of, name) if of == "spec" else name] = _text(value)
    return found


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(each)}" for key, each in sorted(value.items())) or "none"
    if isinstance(value, frozenset | set):
        return ", ".join(sorted(value)) or "none"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(_text, value)) + ")"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _hashed(values: Iterable[Any]) -> str:
    found = list(map(str, values))
    return digest(" ".join(sorted(found) if not isinstance(values, list) else found).encode())
