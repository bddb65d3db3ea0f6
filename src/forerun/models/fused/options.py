"""What several families read from a Transformers configuration."""

from __future__ import annotations

from typing import Any

from forerun.models.fused.spec import ATTENTION, FEED, QKV

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
_ACTIVATION_OPTIONS = ("hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act")
Difference = dict[str, Any]
"""Fields of `DecoderSpec` that differ from Llama's; in "modules", a role that is None is left out. Besides: "turned",
which layers rotate; "mixed", which have experts, if not all; "feed_scales", `LayerSpec.feed_scale` of each;
"by_layer", other fields of `LayerSpec` of each;
"rotated_share", the part of each head that is; "blocks", what layers of a type have, as `LayerSpec` says it; "heads",
of `head_shape`, where a configuration has none; and "unserved", options that are not described."""


NO_ROTATION = {"rope_type": "default", "rope_theta": 10000.0}
"""Of a configuration without rotations, of which no layer has any."""


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


def activation_of(config: Any) -> str | None:
    """Return the name of a configuration's activation."""
    return next((found for name in _ACTIVATION_OPTIONS if (found := getattr(config, name, None))), None)


def biases_of(config: Any, *names: str) -> frozenset[str]:
    """Return the roles with biases, by the options of a configuration that say so."""
    roles = {"attention_bias": ATTENTION, "mlp_bias": FEED, "use_bias": ATTENTION | FEED, "use_qkv_bias": QKV}
    return frozenset().union(*(roles[name] for name in names if getattr(config, name, False)))


def rotated_share(config: Any) -> float:
    """Return the part of each head that is rotated."""
    return float(config.rope_parameters.get("partial_rotary_factor") or 1.0)
