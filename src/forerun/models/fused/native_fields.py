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
from forerun.models.fused.parts import Experts, Recurrence
from forerun.models.fused.recurrence import state_layout
from forerun.models.fused.spec import DecoderSpec

_ENUMS = HEADER.enums
_MODEL = (
    *("hidden", "num_heads", "eps", "scale", "is_parallel"),
    *("has_wide_norms", "norms_rotated", "residual_scale", "attention_scale", "activation_scale"),
    *("query_growth", "query_period"),
)
_OF_EXPERTS = ("count", "top", "width", "groups", "best", "top_groups", "adds_to_one", "least_sum", "scale", "distance")
_OF_RECURRENCE = (
    *("num_taps", "channels", "heads", "key_heads", "key_width", "value_width", "norm_width", "gates_first"),
    *("heads_are_tiled", "norm_eps", "beta_scale"),
)
"""Fields of the same name and meaning."""


def model_fields(spec: DecoderSpec) -> dict[str, Any]:
    """Return fields of `ForerunModel`."""
    states = state_layout(spec)
    return {name: getattr(spec, name) for name in _MODEL} | {
        "activation": _ENUMS["ForerunActivation"][spec.activation.upper()],
        "has_layer_norms": spec.norm_kind == "layer",
        "softcap": spec.softcap or 0.0,
        "logit_scale": 0.0 if spec.logit_scale == 1.0 else spec.logit_scale,
        "logit_softcap": spec.logit_softcap or 0.0,
        "record_size": 0 if states is None else states.record_size,
    }


def heads_fields(spec: DecoderSpec) -> dict[str, Any]:
    """Return fields of `ForerunLayer`. spec: as it is in the layer."""
    keys, values = spec.cached_widths
    widths = {name: getattr(spec, name) for name in ("num_kv_heads", "head_dim", "rotated")}
    return {**widths, "key_width": keys, "value_width": values}


def experts_fields(shape: Experts) -> dict[str, Any]:
    """Return fields of `ForerunExperts`."""
    return {name: getattr(shape, name) for name in _OF_EXPERTS} | {
        "scoring": _ENUMS["ForerunScoring"][shape.scoring.upper()]
    }


def recurrence_fields(shape: Recurrence, place: int) -> dict[str, Any]:
    """Return fields of `ForerunRecurrence`. place: of the layer among those that are recurrent."""
    return {name: getattr(shape, name) for name in _OF_RECURRENCE} | {
        "state_at": place * shape.state_size,
        "record_at": place * shape.record_size,
        "kind": _ENUMS["ForerunRecurrenceKind"][shape.kind.upper()],
        **{f"{name}_at": start for name, start in shape.starts.items()},
        **{f"{name}_scale": shape.scale(name) for name in ("gate", "step", "out")},
        "least_step": shape.step_limits[0],
        "most_step": shape.step_limits[1],
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
