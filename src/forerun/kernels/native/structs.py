"""The structures of the C interface (`csrc/forerun.h`), field by field."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum


class Kind(IntEnum):
    """How the numbers of a weight lie in memory; csrc/forerun.h draws each."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT8_GROUPS = 3
    INT4_GROUPS = 4
    INT4_MINIMA = 5


class LinearStruct(Structure):
    """`ForerunLinear`."""

    _fields_ = [
        ("kind", c_int32),
        ("out_features", c_int32),
        ("in_features", c_int32),
        ("reserved", c_int32),
        ("packed", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
    ]


class LayerStruct(Structure):
    """`ForerunLayer`."""

    _fields_ = [
        ("input_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("query", LinearStruct),
        ("key", LinearStruct),
        ("value", LinearStruct),
        ("out", LinearStruct),
        ("gate", LinearStruct),
        ("up", LinearStruct),
        ("down", LinearStruct),
        ("window", c_int32),
        ("reserved", c_int32),
    ]


class ModelStruct(Structure):
    """`ForerunModel`."""

    _fields_ = [
        ("layers", POINTER(LayerStruct)),
        ("norm", c_void_p),
        ("head", LinearStruct),
        ("num_layers", c_int32),
        ("hidden", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("intermediate", c_int32),
        ("page", c_int32),
        ("cache_float32", c_int32),
        ("eps", c_float),
        ("scale", c_float),
    ]


class EagleStruct(Structure):
    """`ForerunEagle`."""

    _fields_ = [
        ("model", ModelStruct),
        ("embedding_norm", c_void_p),
        ("state_norm", c_void_p),
        ("entry", LinearStruct),
        ("residual", LinearStruct),
        ("embedding_width", c_int32),
        ("state_width", c_int32),
        ("keeps_norm", c_int32),
        ("gives_norm", c_int32),
    ]


class RowsStruct(Structure):
    """`ForerunRows`."""

    _fields_ = [
        ("sequence", c_void_p),
        ("position", c_void_p),
        ("slot", c_void_p),
        ("prefix", c_void_p),
        ("tail_start", c_void_p),
        ("tail", c_void_p),
        ("pages", c_void_p),
        ("page_start", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("num_rows", c_int32),
        ("rotated_by_slot", c_int32),
    ]


class AttentionStruct(Structure):
    """`ForerunAttention`."""

    _fields_ = [
        ("offset", c_int64),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("key_width", c_int32),
        ("value_width", c_int32),
        ("page", c_int32),
        ("cache_float32", c_int32),
        ("window", c_int32),
        ("reserved", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
    ]
