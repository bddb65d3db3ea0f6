"""The families that the fused decoder computes, each by how it differs from Llama.

To add one, write a function of its configuration in `llama_families.py`, `gpt_families.py`, `expert_families.py`,
`latent_families.py`, `recurrent_families.py` or a file of its own, and add it to the table there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from forerun.models.fused.expert_families import EXPERT_FAMILIES
from forerun.models.fused.gemma4_family import gemma4
from forerun.models.fused.gpt_families import GPT_FAMILIES
from forerun.models.fused.latent_families import LATENT_FAMILIES
from forerun.models.fused.llama_families import LLAMA_FAMILIES
from forerun.models.fused.options import (
    ACTIVATIONS,
    NO_ROTATION,
    Difference,
    activation_of,
    head_shape,
    layer_windows,
)
from forerun.models.fused.recurrent_families import RECURRENT_FAMILIES
from forerun.models.fused.spec import LLAMA_MODULES, DecoderSpec, LayerSpec


def spec_of(config: Any) -> DecoderSpec:
    """Return the decoder of a configuration of one of FAMILIES."""
    difference = FAMILIES[config.model_type](config)
    heads, kv_heads, width = difference.pop("heads", None) or head_shape(config)
    kv_heads = difference.pop("num_kv_heads", kv_heads)
    modules = {**LLAMA_MODULES, **difference.pop("modules", {})}
    difference.pop("unserved", None)
    blocks = _blocks(difference)
    windows, rope = layer_windows(config), getattr(config, "rope_parameters", None) or NO_ROTATION
    turned = difference.pop("turned", [True] * len(windows))
    mixed = difference.pop("mixed", ["experts" in difference] * len(windows))
    scales = difference.pop("feed_scales", [1.0] * len(windows))
    by_layer = difference.pop("by_layer", [{}] * len(windows))
    kinds = getattr(config, "layer_types", None) or [""] * len(windows)
    by_kind = {kind: rope[kind] for kind in dict.fromkeys(kinds) if isinstance(rope.get(kind), Mapping)}
    places = {kind: place for place, kind in enumerate(by_kind)}
    layers = tuple(
        LayerSpec(
            window,
            places.get(kind, 0) if is_turned else None,
            **{"has_experts": has_experts, "feed_scale": scale, **blocks.get(kind, {}), **own},
        )
        for window, kind, is_turned, has_experts, scale, own in zip(
            *(windows, kinds, turned, mixed, scales, by_layer), strict=True
        )
    )
    if not layers:
        raise ValueError("it has no layers")
    share = difference.pop("rotated_share", 1.0)
    return DecoderSpec(
        **{
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": width,
            "hidden": config.hidden_size,
            "intermediate": getattr(config, "intermediate_size", None) or 0,
            "layers": layers,
            "rotations": tuple(by_kind.items()) or ((None, rope),),
            "rotated": int(width * share),
            "scale": width**-0.5,
            "eps": getattr(config, "rms_norm_eps", None) or 0.0,
            "modules": {role: name for role, name in modules.items() if name is not None},
            "activation": ACTIVATIONS.get(activation_of(config) or "silu", ""),
            **difference,
        }
    )


def spec_in(model: Any) -> DecoderSpec:
    """Return the decoder of a model's modules: their own, as draft heads have it, or that of their configuration."""
    return getattr(model, "spec", None) or spec_of(model.config)


def _blocks(difference: Difference) -> dict[str, dict[str, bool]]:
    """Take out what layers of each type have, as `LayerSpec` says it, where that is not attention and feed-forward."""
    kinds = _RECURRENT[difference["recurrence"].kind] if "recurrence" in difference else ()
    recurrent = {kind: {"attends": False, "is_recurrent": True} for kind in kinds}
    return {**recurrent, **difference.pop("blocks", {})}


def frequencies(config: Any, spec: DecoderSpec) -> list[tuple[Tensor, float]]:
    """Return each rotation's inverse frequencies, [rotated / 2] float32, and the factor of its cosines and sines, as
    Transformers computes them."""
    found = []
    for place, (kind, rope) in enumerate(spec.rotations):
        rotated = next((spec.within(own).rotated for own in spec.layers if own.rotation == place), spec.rotated)
        if rope["rope_type"] == "default":
            powers = torch.arange(0, rotated, 2, dtype=torch.float) / rotated
            found.append((1.0 / (rope["rope_theta"] ** powers), 1.0))
        else:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            options = {} if kind is None else {"layer_type": kind}
            found.append(ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, **options))
    return [(-angles, factor) if spec.turns_back else (angles, factor) for angles, factor in found]


_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
_RECURRENT = {
    "short_convolution": ("conv",),
    "delta_rule": ("linear_attention",),
    "state_space": ("linear_attention", "mamba"),
}
"""Transformers' names of recurrent layers, by kind of recurrence."""
_UNSERVED = (
    "qk_layernorm",
    "clip_qkv",
    "use_bidirectional_attention",
    "scale_attn_by_inverse_layer_idx",
)
_SERVED = (None, False, 0, "vision")  # the last in Gemma 4, and of images alone
_DIFFERING = {"gemma4_text": {"head_dim", "num_key_value_heads"}}
"""By model type, what layers of one type may have otherwise than those of another."""
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


def refusal(config: Any) -> str | None:
    """Return the reason why no entry describes a Transformers configuration; None if one does."""
    model_type = str(getattr(config, "model_type", None))
    if model_type not in FAMILIES:
        return f"model type {model_type!r} is not one of {', '.join(FAMILIES)}"
    differing = set(getattr(config, "per_layer_attributes", None) or ()) - _DIFFERING.get(model_type, set())
    if differing:
        return f"layers that differ in {', '.join(sorted(differing))}"
    try:
        unserved = [option for option in _UNSERVED if getattr(config, option, None) not in _SERVED]
        difference = FAMILIES[model_type](config)
        for option in (*unserved, *difference.get("unserved", ())):
            return f"{option}={getattr(config, option)!r}"
        spec = spec_of(config)
        served = _LAYER_TYPES | _blocks(difference).keys()
        if foreign := set(getattr(config, "layer_types", None) or ()) - served:
            return f"layers of type {', '.join(sorted(foreign))}"
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as failure:
        return f"its values describe no {model_type}: {failure}"
    if reason := length_dependence(config):
        return reason
    for _, rope in spec.rotations:
        kind = rope.get("rope_type", "default")
        if kind not in _ROPE_TYPES:
            return f"rope type {kind!r} depends on the sequence's length"
        share = 1.0 if kind == "proportional" else rope.get("partial_rotary_factor") or 1.0
        width = spec.head_dim if spec.latent is None else spec.rotated
        if kind != "default" and int(width * share) != spec.rotated:  # Llama's default type does not read it
            return f"a rotation of {share} of each head"
    alike: dict[int | None, tuple[int, ...]] = {}  # by window: the native kernels prepare both kinds once
    for own, each in ((own, spec.within(own)) for own in spec.layers):
        shape = each.head_dim % 2, each.cached_widths[0] % 2, each.rotated % 2
        heads = each.num_kv_heads, *each.cached_widths
        is_other = heads != alike.setdefault(own.window or None, heads)
        if any(shape) or is_other or each.num_heads % max(1, each.num_kv_heads):
            return f"{each.num_heads} query heads and {each.num_kv_heads} key heads of width {each.head_dim}"
    if not spec.activation:
        return f"activation {activation_of(config)!r}"
    if len({layer.window for layer in spec.layers} - {None}) > 1:
        return "windows of several widths"
    return None


def length_dependence(config: Any) -> str | None:
    """Return the reason why the longest sequence of a batch decides how Transformers rotates all; None if none does."""
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(inner for inner in rope.values() if isinstance(inner, Mapping))):
        if each.get("short_factor") != each.get("long_factor"):  # of longrope
            return f"rope type {each.get('rope_type')!r} depends on the sequence's length"
    return None


FAMILIES: Mapping[str, Callable[[Any], Difference]] = dict(
    sorted(
        {
            **LLAMA_FAMILIES,
            **GPT_FAMILIES,
            **EXPERT_FAMILIES,
            **LATENT_FAMILIES,
            **RECURRENT_FAMILIES,
            "gemma4_text": gemma4,
        }.items()
    )
)
"""How each family differs from Llama, by Transformers' model type."""
