"""All families by Transformers' model type, and what a configuration of one describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.models.families.build import activation_option, reasons_collected
from forerun.models.families.gemma import GEMMA_ARCHITECTURES, GEMMA_FAMILIES
from forerun.models.families.gguf_keys import Architecture
from forerun.models.families.gpt import GPT_ARCHITECTURES, GPT_FAMILIES
from forerun.models.families.llama import LLAMA_ARCHITECTURES, LLAMA_FAMILIES
from forerun.models.families.mamba import MAMBA_ARCHITECTURES, MAMBA_FAMILIES
from forerun.models.families.mla import MLA_ARCHITECTURES, MLA_FAMILIES
from forerun.models.families.moe import MOE_ARCHITECTURES, MOE_FAMILIES
from forerun.models.families.recurrent import RECURRENT_ARCHITECTURES, RECURRENT_FAMILIES
from forerun.models.spec.attention import LatentAttention
from forerun.models.spec.decoder import DecoderSpec

FAMILIES: Mapping[str, Callable[[Any], DecoderSpec]] = dict(
    sorted(
        {
            **LLAMA_FAMILIES,
            **GEMMA_FAMILIES,
            **GPT_FAMILIES,
            **MOE_FAMILIES,
            **MLA_FAMILIES,
            **RECURRENT_FAMILIES,
            **MAMBA_FAMILIES,
        }.items()
    )
)
"""Transformers' model type -> the decoder of a configuration."""
ARCHITECTURES: Mapping[str, Architecture] = dict(
    sorted(
        {
            **LLAMA_ARCHITECTURES,
            **GEMMA_ARCHITECTURES,
            **GPT_ARCHITECTURES,
            **MOE_ARCHITECTURES,
            **MLA_ARCHITECTURES,
            **RECURRENT_ARCHITECTURES,
            **MAMBA_ARCHITECTURES,
        }.items()
    )
)
"""llama.cpp's architecture -> what a GGUF file of it says in its own way. One may be of several model types."""
_DIFFERING = {"gemma4_text": {"head_dim", "num_key_value_heads"}}
"""By model type, what layers of one type may have otherwise than those of another."""
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


def spec_of(config: Any) -> DecoderSpec:
    """Return the decoder of a configuration of one of FAMILIES, whether the fused decoder computes it or not."""
    return FAMILIES[config.model_type](config)


def spec_in(model: Any) -> DecoderSpec:
    """Return the decoder of a model's modules: their own, as draft heads have it, or that of their configuration."""
    return getattr(model, "spec", None) or spec_of(model.config)


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
        with reasons_collected() as reasons:
            spec = spec_of(config)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as failure:
        return Description(None, f"its values describe no {model_type}: {failure}")
    reason = reasons[0] if reasons else length_dependence(config) or _refused_numbers(config, spec)
    return Description(spec, reason)


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
    if not all(each.feed_forward.activation for each in spec.layers if each.feed_forward is not None):
        return f"activation {activation_option(config)!r}"
    if len({each.window for each in attentions} - {None}) > 1:
        return "windows of several widths"
    return None


def length_dependence(config: Any) -> str | None:
    """Return the reason why the longest sequence of a batch decides how Transformers rotates all; None if none does."""
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(inner for inner in rope.values() if isinstance(inner, Mapping))):
        if each.get("short_factor") != each.get("long_factor"):  # of longrope
            return f"rope type {each.get('rope_type')!r} depends on the sequence's length"
    return None
