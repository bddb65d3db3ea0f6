"""The families that the fused decoder computes, each by how it differs from Llama.

To add one, write a function of its configuration in `llama_families.py`, `gpt_families.py`, `expert_families.py`,
`latent_families.py`, `recurrent_families.py` or a file of its own, and add it to the table there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    Has,
    activation_of,
    head_shape,
    layer_windows,
)
from forerun.models.fused.recurrent_families import RECURRENT_FAMILIES
from forerun.models.spec.attention import LLAMA_ATTENTION, AnyAttention, Attention, LatentAttention, Rope
from forerun.models.spec.decoder import DecoderSpec, Embeddings, Norms, Output
from forerun.models.spec.feed_forward import EXPERT, LLAMA_FEED, AnyFeedForward, Experts, FeedForward
from forerun.models.spec.layer import LAYER_NORMS, LLAMA_NORMS, LayerSpec, PerLayerInput
from forerun.models.spec.part import Part
from forerun.models.spec.recurrence import Recurrence

_LLAMA: Mapping[str, str] = {**LLAMA_ATTENTION, **LLAMA_FEED, **LLAMA_NORMS}
_OF_ATTENTION: tuple[str, ...] = (
    "qkv_groups",
    "softcap",
    "sinks",
    "keys_of",
    "has_wide_norms",
    "norms_rotated",
    "norms_values",
)
_OF_ATTENTION += ("gates_heads", "query_growth", "query_period")


def spec_of(config: Any) -> DecoderSpec:
    """Return the decoder of a configuration of one of FAMILIES."""
    return _made(config)[0]


def _made(config: Any) -> tuple[DecoderSpec, Sequence[str], set[str]]:
    """Return the decoder of a configuration, the options of it that are not served, and the types of layers that are
    known."""
    own = FAMILIES[config.model_type](config)
    rope = getattr(config, "rope_parameters", None) or NO_ROTATION
    kinds = getattr(config, "layer_types", None) or ()
    turning = [kind for kind in dict.fromkeys(kinds) if isinstance(rope.get(kind), Mapping)]
    by_kind: dict[str | None, Any] = {kind: rope[kind] for kind in turning}
    layers = _layers(config, own, turning)
    rotations = own.get("rotations") or tuple(by_kind.items()) or ((None, rope),)
    biases = own.get("biases", frozenset())
    spec = DecoderSpec(
        hidden=config.hidden_size,
        layers=layers,
        ropes=tuple(
            Rope(parameters, _rotated(config, own, layers, place), kind, own.get("turns_back", False))
            for place, (kind, parameters) in enumerate(rotations)
        ),
        norms=Norms(
            own.get("eps", getattr(config, "rms_norm_eps", None) or 0.0),
            own.get("norm_kind", "rms"),
            own.get("norm_offset", 0.0),
            own.get("has_norm_weights", True),
            "norms" in biases,
        ),
        embeddings=Embeddings(
            own.get("embedding", "embed_tokens"),
            own.get("embedding_scale", 1.0),
            own.get("norms_embeddings", False),
            own.get("positions"),
            own.get("first_position", 0),
            own.get("per_layer"),
        ),
        output=Output(
            own.get("norm", "norm"),
            own.get("head", "lm_head"),
            "head" in biases,
            own.get("logit_scale", 1.0),
            own.get("logit_softcap"),
        ),
        residual_scale=own.get("residual_scale", 1.0),
        base=own.get("base", "model"),
        layer_list=own.get("layer_list", "layers"),
        renamed=own.get("renamed", {}),
    )
    return spec, own.get("unserved", ()), _LAYER_TYPES | _blocks(own).keys()


def _layers(config: Any, own: Difference, turning: list[str]) -> tuple[LayerSpec, ...]:
    """Return the layers of a configuration. turning: types of layers with a rotation each."""
    windows = layer_windows(config)
    blocks = _blocks(own)
    if not windows:
        raise ValueError("it has no layers")
    count = len(windows)
    found = []
    kinds = getattr(config, "layer_types", None) or [""] * count
    for window, kind, is_turned, has_experts, scale, further in zip(
        windows,
        kinds,
        own.get("turned", [True] * count),
        own.get("mixed", ["experts" in own] * count),
        own.get("feed_scales", [1.0] * count),
        own.get("by_layer", [Difference()] * count),
        strict=True,
    ):
        of_layer: Difference = {**own, **further}
        has: Has = {"attends": True, "is_recurrent": False, "feeds": True, **blocks.get(kind, Has())}
        modules = {role: name for role, name in {**_LLAMA, **of_layer.get("modules", {})}.items() if name is not None}
        place = turning.index(kind) if kind in turning else 0
        attention = _attention(config, of_layer, modules, place if is_turned else None, window)
        inputs = of_layer.get("per_layer")
        layer = LayerSpec(
            hidden=config.hidden_size,
            attention=attention if has["attends"] else None,
            recurrence=_recurrence(of_layer, modules) if has["is_recurrent"] else None,
            feed_forward=_feed_forward(config, of_layer, modules, scale, has_experts) if has["feeds"] else None,
            per_layer_input=None
            if inputs is None
            else PerLayerInput(
                width=inputs.width, activation=_activation(config, of_layer), **_roles(PerLayerInput, of_layer, modules)
            ),
            norms=_norms(of_layer, modules, has),
            is_parallel=of_layer.get("is_parallel", False),
            is_transposed=of_layer.get("is_transposed", False),
            scalar=of_layer.get("scalar"),
        )
        found.append(layer)
    return tuple(found)


def _norms(own: Difference, modules: Mapping[str, str], has: Has) -> dict[str, str]:
    """Return the norms of a layer by role."""
    owners = {"mlp_norm": "feeds", "feed_norm": "feeds", **own.get("norm_owners", {})}
    there = {"mixes": has["attends"] or has["is_recurrent"], **has}
    return {role: modules[role] for role in LAYER_NORMS if role in modules and there[owners.get(role, "mixes")]}


def _attention(
    config: Any, own: Difference, modules: Mapping[str, str], rope: int | None, window: int | None
) -> AnyAttention:
    heads, kv_heads, width = own.get("heads") or head_shape(config)
    width = own.get("head_dim", width)
    sizes: dict[str, Any] = {
        "num_heads": heads,
        "head_dim": width,
        "scale": own.get("scale", width**-0.5),
        "rotated": own.get("rotated", int(width * own.get("rotated_share", 1.0))),
        "is_interleaved": own.get("is_interleaved", False),
        "rope": rope,
        "window": window,
    }
    if "latent" in own:
        return LatentAttention(**sizes, **own["latent"], **_roles(LatentAttention, own, modules))
    named: dict[str, Any] = {name: value for name, value in own.items() if name in _OF_ATTENTION}
    return Attention(
        **sizes,
        **named,
        num_kv_heads=own.get("num_kv_heads", kv_heads),
        out_scale=own.get("attention_scale", 1.0),
        **_roles(Attention, own, modules),
    )


def _recurrence(own: Difference, modules: Mapping[str, str]) -> Recurrence:
    has_conv_bias = "conv1d" in own.get("biases", ())
    return replace(own["recurrence"], has_conv_bias=has_conv_bias, **_roles(Recurrence, own, modules))


def _feed_forward(
    config: Any, own: Difference, modules: Mapping[str, str], scale: float, has_experts: bool
) -> AnyFeedForward:
    common: dict[str, Any] = {
        "activation": _activation(config, own),
        "activation_scale": own.get("activation_scale", 1.0),
    }
    common |= {"out_scale": scale}
    if has_experts:
        return replace(own["experts"], **common, **_roles(Experts, own, modules))
    width = own.get("intermediate", getattr(config, "intermediate_size", None) or 0)
    roles = _roles(FeedForward, own, modules)
    return FeedForward(intermediate_size=width, xielu=own.get("xielu"), **common, **roles)


def _activation(config: Any, own: Difference) -> str:
    return own.get("activation", ACTIVATIONS.get(activation_of(config) or "silu", ""))


def _roles(part: type[Part], own: Difference, modules: Mapping[str, str]) -> dict[str, Any]:
    """Return the modules and the biases of a part."""
    further = ("router", *EXPERT) if part is Experts else ()
    biases = own.get("biases", frozenset()) & {*part.ROLES, *further}
    return {
        "modules": {role: modules[role] for role in (*part.ROLES, *part.NORMS) if role in modules},
        "biases": biases,
    }


def _rotated(config: Any, own: Difference, layers: Sequence[LayerSpec], place: int) -> int:
    """Return how many numbers of a head a rotation turns. place: of it."""
    attentions = (layer.attention for layer in layers)
    found = next((each.rotated for each in attentions if each is not None and each.rope == place), None)
    return _attention(config, own, {}, None, None).rotated if found is None else found


def spec_in(model: Any) -> DecoderSpec:
    """Return the decoder of a model's modules: their own, as draft heads have it, or that of their configuration."""
    return getattr(model, "spec", None) or spec_of(model.config)


def _blocks(own: Difference) -> dict[str, Has]:
    """Return what layers of each type have, where that is not attention and feed-forward."""
    kinds = _RECURRENT[own["recurrence"].kind] if "recurrence" in own else ()
    recurrent: dict[str, Has] = {kind: {"attends": False, "is_recurrent": True} for kind in kinds}
    return {**recurrent, **own.get("blocks", {})}


def frequencies(config: Any, spec: DecoderSpec) -> list[tuple[Tensor, float]]:
    """Return each rotation's inverse frequencies, [rotated / 2] float32, and the factor of its cosines and sines, as
    Transformers computes them."""
    found = []
    for rope in spec.ropes:
        kind = rope.parameters["rope_type"]
        if kind == "default":
            powers = torch.arange(0, rope.rotated, 2, dtype=torch.float) / rope.rotated
            angles = 1.0 / (rope.parameters["rope_theta"] ** powers)
            factor = 1.0
        else:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            options = {} if rope.layer_type is None else {"layer_type": rope.layer_type}
            angles, factor = ROPE_INIT_FUNCTIONS[kind](config, **options)
        found.append((-angles if rope.turns_back else angles, factor))
    return found


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


@dataclass(frozen=True, slots=True)
class Description:
    """What a Transformers configuration describes.

    Attributes:
        spec: the decoder; None where no entry of FAMILIES says it.
        refusal: the reason why the fused decoder does not compute it; None if it does.
    """

    spec: DecoderSpec | None
    refusal: str | None

    @property
    def served(self) -> DecoderSpec | None:
        """Return the decoder if the fused decoder computes it."""
        return self.spec if self.refusal is None else None


def description_of(config: Any) -> Description:
    """Return what a Transformers configuration describes. A load calls this once, and hands its spec on."""
    model_type = str(getattr(config, "model_type", None))
    if model_type not in FAMILIES:
        return Description(None, f"model type {model_type!r} is not one of {', '.join(FAMILIES)}")
    differing = set(getattr(config, "per_layer_attributes", None) or ()) - _DIFFERING.get(model_type, set())
    if differing:
        return Description(None, f"layers that differ in {', '.join(sorted(differing))}")
    try:
        spec, unserved, kinds = _made(config)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as failure:
        return Description(None, f"its values describe no {model_type}: {failure}")
    unserved = [*(option for option in _UNSERVED if getattr(config, option, None) not in _SERVED), *unserved]
    if unserved:
        return Description(spec, f"{unserved[0]}={getattr(config, unserved[0])!r}")
    if foreign := set(getattr(config, "layer_types", None) or ()) - kinds:
        return Description(spec, f"layers of type {', '.join(sorted(foreign))}")
    return Description(spec, length_dependence(config) or _refused_numbers(config, spec))


def refusal(config: Any) -> str | None:
    """Return the reason why the fused decoder does not compute a Transformers configuration; None if it does."""
    return description_of(config).refusal


def _refused_numbers(config: Any, spec: DecoderSpec) -> str | None:
    """Return the reason why the fused decoder does not compute a decoder with these numbers; None if it does."""
    attentions = [layer.attention for layer in spec.layers if layer.attention is not None]
    for rope in spec.ropes:
        kind = rope.parameters.get("rope_type", "default")
        if kind not in _ROPE_TYPES:
            return f"rope type {kind!r} depends on the sequence's length"
        share = 1.0 if kind == "proportional" else rope.parameters.get("partial_rotary_factor") or 1.0
        own = attentions[0] if attentions else None
        if own is not None and kind != "default":  # Llama's default type does not read it
            width = own.rotated if isinstance(own, LatentAttention) else own.head_dim
            if int(width * share) != own.rotated:
                return f"a rotation of {share} of each head"
    alike: dict[int | None, tuple[int, ...]] = {}  # by window: the native kernels prepare both kinds once
    for each in attentions:
        odd = each.head_dim % 2, each.cached_widths[0] % 2, each.rotated % 2
        heads = each.num_kv_heads, *each.cached_widths
        is_other = heads != alike.setdefault(each.window or None, heads)
        if any(odd) or is_other or each.num_heads % max(1, each.num_kv_heads):
            return f"{each.num_heads} query heads and {each.num_kv_heads} key heads of width {each.head_dim}"
    if not all(part.activation for part in _activated(spec)):
        return f"activation {activation_of(config)!r}"
    if len({each.window for each in attentions} - {None}) > 1:
        return "windows of several widths"
    return None


def _activated(spec: DecoderSpec) -> list[AnyFeedForward]:
    return [layer.feed_forward for layer in spec.layers if layer.feed_forward is not None]


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
