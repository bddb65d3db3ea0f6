"""The numbers of a spec, and of a forward, as structures of the native library have them (`kernels/cpu/library.py`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.kernels.cpu.library import HEADER, StateStruct
from forerun.kv_cache.recurrent_state import RecordedState
from forerun.models.attention.base import PackedRows
from forerun.models.fused.parts import state_layout
from forerun.models.spec.attention import Attention
from forerun.models.spec.decoder import DecoderSpec
from forerun.models.spec.feed_forward import SHARED, AnyFeedForward, Experts
from forerun.models.spec.layer import LayerSpec
from forerun.models.spec.recurrence import Recurrence

_ENUMS = HEADER.enums
NAMES = {
    "kv_a_proj": "key",
    "per_layer_input_gate": "token_gate",
    "per_layer_projection": "token_out",
    "post_per_layer_input_norm": "token_norm",
    **{role: role.removeprefix("shared_") for role in SHARED},
    "in_proj_qkv": "mixed",
    "in_proj_z": "gate",
    "in_proj_b": "beta",
    "in_proj_a": "decay",
    "out_proj": "out",
    "conv1d": "taps",
    "conv1d_bias": "taps_bias",
    "A_log": "rate",
    "dt_bias": "step_bias",
    "D": "skip",
}
"""Roles and parameters by other names in the library's structures of layers and recurrences."""
_NO_ATTENTION = Attention(num_heads=1, num_kv_heads=1, head_dim=2, rotated=2, scale=2**-0.5)
"""The sizes that a decoder without attention is given."""
_OF_EXPERTS = {
    "count": "num_experts",
    "top": "num_experts_per_tok",
    "width": "moe_intermediate_size",
    "groups": "n_group",
    "best": "scores_of_group",
    "top_groups": "topk_group",
    "adds_to_one": "norm_topk_prob",
    "least_sum": "least_sum",
    "scale": "routed_scaling_factor",
    "distance": "distance",
}
_OF_RECURRENCE = {
    "num_taps": "conv_kernel",
    "norm_width": "normed_width",
    **{name: name for name in ("channels", "heads", "key_heads", "key_width", "value_width", "gates_first")},
    **{name: name for name in ("heads_are_tiled", "norm_eps", "beta_scale")},
}
"""Fields, and attributes of the same meaning."""


def model_fields(spec: DecoderSpec) -> dict[str, Any]:
    """Return fields of `ForerunModel`. What attention and feed-forward layers have in all layers is the model's."""
    states = state_layout(spec)
    attention = spec.attention or _NO_ATTENTION
    plain = attention if isinstance(attention, Attention) else _NO_ATTENTION
    feed = next((each.feed_forward for each in spec.layers if each.feed_forward is not None), AnyFeedForward())
    return {
        "hidden": spec.hidden,
        "num_heads": attention.num_heads,
        "scale": attention.scale,
        "softcap": plain.softcap or 0.0,
        "has_wide_norms": plain.has_wide_norms,
        "norms_rotated": plain.norms_rotated,
        "query_growth": plain.query_growth,
        "query_period": plain.query_period,
        "attention_scale": plain.out_scale,
        "activation": _ENUMS["ForerunActivation"][feed.activation.upper()],
        "activation_scale": feed.activation_scale,
        "is_parallel": any(layer.is_parallel for layer in spec.layers),
        "residual_scale": spec.residual_scale,
        "eps": spec.norms.eps,
        "has_layer_norms": spec.norms.kind == "layer",
        "logit_scale": 0.0 if spec.output.scale == 1.0 else spec.output.scale,
        "logit_softcap": spec.output.softcap or 0.0,
        "record_size": 0 if states is None else states.record_size,
    }


def layer_fields(own: LayerSpec, spec: DecoderSpec) -> dict[str, Any]:
    """Return fields of `ForerunLayer`, of a layer without attention with the sizes of one that has it."""
    attention = own.attention or spec.attention or _NO_ATTENTION
    keys, values = attention.cached_widths
    return {
        "window": attention.window or 0 if own.attention is not None else 0,
        "rotation": -1 if attention.rope is None else attention.rope,
        "feed_scale": 1.0 if own.feed_forward is None else own.feed_forward.out_scale,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "rotated": attention.rotated,
        "key_width": keys,
        "value_width": values,
    }


def experts_fields(shape: Experts) -> dict[str, Any]:
    """Return fields of `ForerunExperts`."""
    found = {name: getattr(shape, ours) for name, ours in _OF_EXPERTS.items()}
    return found | {"scoring": _ENUMS["ForerunScoring"][shape.scoring.upper()]}


def recurrence_fields(shape: Recurrence, place: int) -> dict[str, Any]:
    """Return fields of `ForerunRecurrence`. place: of the layer among those that are recurrent."""
    return {name: getattr(shape, ours) for name, ours in _OF_RECURRENCE.items()} | {
        "state_at": place * shape.state_size,
        "record_at": place * shape.record_size,
        "kind": _ENUMS["ForerunRecurrenceKind"][shape.kind.upper()],
        **{f"{name}_at": start for name, start in shape.starts.items()},
        **{f"{name}_scale": shape.scale(name) for name in ("gate", "step", "out")},
        "least_step": shape.time_step_limit[0],
        "most_step": shape.time_step_limit[1],
    }


def served_numbers(numbers: Tensor) -> Tensor:
    """Return numbers in a type that the kernels multiply."""
    return numbers if numbers.dtype in (torch.float32, torch.bfloat16) else numbers.float()


def states_array(packed: Sequence[PackedRows]) -> ctypes.Array[StateStruct]:
    """Return what the sequences of a forward have kept in recurrent layers."""
    found = (StateStruct * len(packed))()
    for place, rows in enumerate(packed):
        assert isinstance(rows.cache.state, RecordedState)
        found[place] = StateStruct(*rows.cache.state.fields(rows.first))
    return found
