"""Builds decoders from Transformers configurations: parts as Llama has them, but for what a family says."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from forerun.models.spec.attention import (
    ATTENTION,
    LLAMA_ATTENTION,
    QKV,
    AnyAttention,
    Attention,
    Rope,
)
from forerun.models.spec.decoder import DecoderSpec, Norms
from forerun.models.spec.feed_forward import EXPERT, FEED, LLAMA_FEED, AnyFeedForward, Experts, FeedForward
from forerun.models.spec.layer import LAYER_NORMS, LLAMA_NORMS, LayerSpec
from forerun.models.spec.part import Part
from forerun.models.spec.recurrence import Recurrence

Modules = Mapping[str, str | None]
"""Role -> the module of a layer; None: there is none."""
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
NO_ROTATION = {"rope_type": "default", "rope_theta": 10000.0}
"""Of a configuration without rotations, of which no layer has any."""
_ACTIVATION_OPTIONS = ("hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act")
_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
_OF_SEVERAL = ("qk_layernorm", "clip_qkv", "use_bidirectional_attention", "scale_attn_by_inverse_layer_idx")
"""Options of several families that no decoder computes."""
_NOT_SET = (None, False, 0, "vision")  # the last in Gemma 4, and of images alone
NO_MODULES: Modules = MappingProxyType({})
_NO_BIASES = frozenset[str]()
_REASONS: ContextVar[list[str] | None] = ContextVar("reasons", default=None)
"""Where `not_computed` collects; None: nobody asks."""


@contextmanager
def reasons_collected() -> Iterator[list[str]]:
    """Collect why the fused decoder does not compute a configuration, while a family's function makes its decoder."""
    reasons = list[str]()
    token = _REASONS.set(reasons)
    try:
        yield reasons
    finally:
        _REASONS.reset(token)


def not_computed(reason: str) -> None:
    """Say why the fused decoder does not compute a configuration. Its decoder is made all the same: whatever computes
    it, the names of tensors depend on it."""
    if (reasons := _REASONS.get()) is not None:
        reasons.append(reason)


def require(config: Any, option: str, *computed: Any) -> None:
    """Say that the fused decoder does not compute a configuration unless an option has one of these values."""
    if (value := getattr(config, option, None)) not in computed:
        not_computed(f"{option}={value!r}")


def of_first_layer(config: Any) -> Any:
    """Return the configuration of the first layer where layers differ, else the configuration itself."""
    return config.per_layer_config[0] if getattr(config, "per_layer_attributes", None) else config


def head_shape(config: Any) -> tuple[int, int, int]:
    """Return the query heads, the key heads, and the width of a head; where layers differ, of the first."""
    config = of_first_layer(config)
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


def activation_option(config: Any) -> str | None:
    """Return Transformers' name of a configuration's activation."""
    return next((found for name in _ACTIVATION_OPTIONS if (found := getattr(config, name, None))), None)


def activation(config: Any) -> str:
    """Return the activation of a configuration (`AnyFeedForward.activation`); empty if it is none of them."""
    return ACTIVATIONS.get(activation_option(config) or "silu", "")


def biases_of(config: Any, *names: str) -> frozenset[str]:
    """Return the roles with biases, by the options of a configuration that say so."""
    roles = {"attention_bias": ATTENTION, "mlp_bias": FEED, "use_bias": ATTENTION | FEED, "use_qkv_bias": QKV}
    return frozenset().union(*(roles[name] for name in names if getattr(config, name, False)))


def rotated_share(config: Any) -> float:
    """Return the part of each head that is rotated."""
    return float(config.rope_parameters.get("partial_rotary_factor") or 1.0)


def fused_qkv(module: str) -> dict[str, str]:
    """Return the modules of queries, keys and values that one module has together."""
    return dict.fromkeys(("query", "key", "value"), module)


def attention(
    config: Any, modules: Modules = NO_MODULES, *, biases: frozenset[str] = _NO_BIASES, **differing: Any
) -> Attention:
    """Return attention with keys and values of each head.

    Args:
        modules: those that are not Llama's, or that Llama has not.
        biases: roles with a bias; those of other parts are left out.
        differing: fields of `Attention`. rotated_share: the part of each head that is rotated.
    """
    heads, kv_heads, width = head_shape(config)
    width = differing.get("head_dim", width)
    fields = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": width,
        "scale": width**-0.5,
        "rotated": int(width * differing.pop("rotated_share", 1.0)),
        **_roles(Attention, {**LLAMA_ATTENTION, **modules}, biases),
    }
    return Attention(**{**fields, **differing})


def feed_forward(
    config: Any, modules: Modules = NO_MODULES, *, biases: frozenset[str] = _NO_BIASES, **differing: Any
) -> FeedForward:
    """Return a dense feed-forward layer; arguments as of `attention`. differing: fields of `FeedForward`."""
    fields = {
        "intermediate_size": getattr(config, "intermediate_size", None) or 0,
        "activation": activation(config),
        **_roles(FeedForward, {**LLAMA_FEED, **modules}, biases),
    }
    return FeedForward(**{**fields, **differing})


def mixture(
    config: Any, modules: Modules = NO_MODULES, *, biases: frozenset[str] = _NO_BIASES, **differing: Any
) -> Experts:
    """Return a mixture of experts.

    Args:
        modules: of the expert of all rows, and of norms.
        biases: as of `attention`. differing: fields of `Experts`.
    """
    if "num_experts_per_tok" not in differing:
        differing["num_experts_per_tok"] = config.num_experts_per_tok
    fields = {"activation": activation(config), **_roles(Experts, modules, biases, further=("router", *EXPERT))}
    return Experts(**{**fields, **differing})


def recurrence(modules: Modules, *, biases: frozenset[str] = _NO_BIASES, **fields: Any) -> Recurrence:
    """Return a recurrence. biases: roles, and "conv1d", with a bias."""
    return Recurrence(**_roles(Recurrence, modules, biases), has_conv_bias="conv1d" in biases, **fields)


def _roles(part: type[Part], modules: Modules, biases: frozenset[str], further: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the modules and the biases of a part. further: roles that may have biases."""
    there = (*part.ROLES, *part.NORMS)
    named = {role: name for role in there if (name := modules.get(role)) is not None}
    return {"modules": named, "biases": biases & {*part.ROLES, *further}}


def layer(
    config: Any,
    attention: AnyAttention | None,
    feed_forward: AnyFeedForward | None,
    norms: Mapping[str, str] = LLAMA_NORMS,
    *,
    recurrence: Recurrence | None = None,
    **differing: Any,
) -> LayerSpec:
    """Return a layer.

    Args:
        norms: of LAYER_NORMS; those of a part that it has not are left out.
        differing: further fields of `LayerSpec`.
    """
    has_first = attention is not None or recurrence is not None
    of_first = ("input_norm", "attention_norm")
    there = {role: has_first if role in of_first else feed_forward is not None for role in LAYER_NORMS}
    return LayerSpec(
        hidden=config.hidden_size,
        attention=attention,
        recurrence=recurrence,
        feed_forward=feed_forward,
        norms={role: norms[role] for role in LAYER_NORMS if role in norms and there[role]},
        **differing,
    )


def with_recurrences(
    config: Any, layers: LayerSpec | Sequence[LayerSpec], types: Collection[str], own: Recurrence
) -> list[LayerSpec]:
    """Return layers of which those of some types have a recurrence instead of attention. layers: one for all, or
    each."""
    each = [layers] * config.num_hidden_layers if isinstance(layers, LayerSpec) else layers
    kinds = config.layer_types or [""] * len(each)
    return [
        replace(other, attention=None, recurrence=own) if kind in types else other
        for other, kind in zip(each, kinds, strict=True)
    ]


def decoder(
    config: Any,
    layers: LayerSpec | Sequence[LayerSpec],
    *,
    norms: Norms | None = None,
    turned: Sequence[bool] | None = None,
    ropes: Mapping[str | None, Mapping[str, Any]] | None = None,
    turns_back: bool = False,
    further_types: Collection[str] = (),
    **differing: Any,
) -> DecoderSpec:
    """Return a decoder. Windows, and which rotation a layer has, are said by the configuration.

    Args:
        layers: one for all, or each.
        norms: what they have in common; None: the root of the mean square, with the configuration's epsilon.
        turned: which layers rotate; None: all with attention.
        ropes: parameters by type of layers; None: those of the configuration.
        turns_back: as of `Rope`.
        further_types: of layers, besides those with attention alone.
        differing: further fields of `DecoderSpec`.

    Raises:
        ValueError: there are no layers, or not as many as are told elsewhere.
    """
    for option in _OF_SEVERAL:
        require(config, option, *_NOT_SET)
    kinds = getattr(config, "layer_types", None) or ()
    if foreign := {*kinds} - _LAYER_TYPES - {*further_types}:
        not_computed(f"layers of type {', '.join(sorted(foreign))}")
    windows = layer_windows(config)
    if not windows:
        raise ValueError("it has no layers")
    rope = getattr(config, "rope_parameters", None) or NO_ROTATION
    of_kinds = {kind: rope[kind] for kind in dict.fromkeys(kinds) if isinstance(rope.get(kind), Mapping)}
    own = [layers] * len(windows) if isinstance(layers, LayerSpec) else layers
    placed = [
        _placed(each, window, [*of_kinds].index(kind) if kind in of_kinds else 0, is_turned=is_turned)
        for each, window, kind, is_turned in zip(
            own, windows, kinds or [""] * len(windows), turned or [True] * len(windows), strict=True
        )
    ]
    found: Mapping[Any, Any] = ropes or of_kinds or {None: rope}
    return DecoderSpec(
        hidden=config.hidden_size,
        layers=tuple(placed),
        ropes=tuple(
            Rope(parameters, _rotated(placed, place), kind, turns_back)
            for place, (kind, parameters) in enumerate(found.items())
        ),
        norms=norms or Norms(getattr(config, "rms_norm_eps", None) or 0.0),
        **differing,
    )


def _placed(own: LayerSpec, window: int | None, rope: int, *, is_turned: bool) -> LayerSpec:
    """Return a layer with its window and the place of its rotation."""
    if own.attention is None:
        return own
    return replace(own, attention=replace(own.attention, window=window, rope=rope if is_turned else None))


def _rotated(layers: Sequence[LayerSpec], place: int) -> int:
    """Return how many numbers of a head a rotation turns, by the first layer that has it, or any. place: of it."""
    attentions = [each.attention for each in layers if each.attention is not None]
    turning = [each for each in attentions if each.rope == place]
    return next((each.rotated for each in turning or attentions), 2)
