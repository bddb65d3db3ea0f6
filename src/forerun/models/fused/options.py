"""What several families read from a Transformers configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from forerun.models.spec.attention import ATTENTION, QKV
from forerun.models.spec.decoder import PerLayerInputs
from forerun.models.spec.feed_forward import FEED, Experts
from forerun.models.spec.recurrence import Recurrence

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


class Has(TypedDict, total=False):
    """Which parts the layers of a type have, where that is not attention and a feed-forward layer."""

    attends: bool
    is_recurrent: bool
    feeds: bool


class Difference(TypedDict, total=False):
    """How a family differs from Llama, in fields of parts (`models/spec/`). Those whose names are not the parts' own:

    - modules: of all parts and of layers, by role; None: there is none.
    - biases: roles of all parts, "norms", "head" and "conv1d", that have a bias.
    - heads: of `head_shape`, where a configuration has none. rotated_share: the part of each head that is rotated.
    - rotations: parameters by types of layers. turned: which layers rotate. mixed: which have experts, if not all.
    - feed_scales: `AnyFeedForward.out_scale` of each layer. blocks: what layers of a type have. norm_owners: which
      layers have a norm, by a key of `Has`. by_layer: further differences of each layer.
    - unserved: options that are not described.
    """

    modules: dict[str, Any]
    biases: frozenset[str]
    # attention
    heads: tuple[int, int, int]
    num_kv_heads: int
    head_dim: int
    scale: float
    rotated: int
    rotated_share: float
    is_interleaved: bool
    qkv_groups: int
    softcap: float | None
    sinks: str
    keys_of: int | None
    has_wide_norms: bool
    norms_rotated: bool
    norms_values: bool
    gates_heads: bool
    query_growth: float
    query_period: int
    attention_scale: float
    latent: Mapping[str, Any]
    # feed-forward layers and recurrences
    intermediate: int
    activation: str
    activation_scale: float
    xielu: str | None
    experts: Experts
    recurrence: Recurrence
    # layers
    turned: Sequence[bool]
    mixed: Sequence[bool]
    feed_scales: Sequence[float]
    blocks: Mapping[str, Has]
    norm_owners: Mapping[str, str]
    by_layer: Sequence[Difference]
    is_parallel: bool
    is_transposed: bool
    scalar: str
    # the decoder
    rotations: tuple[tuple[str | None, Mapping[str, Any]], ...]
    turns_back: bool
    eps: float
    norm_kind: str
    norm_offset: float
    has_norm_weights: bool
    embedding: str
    embedding_scale: float
    norms_embeddings: bool
    positions: str
    first_position: int
    per_layer: PerLayerInputs
    norm: str
    head: str
    logit_scale: float
    logit_softcap: float | None
    residual_scale: float
    base: str
    layer_list: str
    renamed: Mapping[str, str]
    unserved: Sequence[str]


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
