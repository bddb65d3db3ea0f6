"""The compiled library: its C interface (`csrc/forerun.h`), field by field, and who owns the threads."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path

import torch

ABI = 1
"""Of the interface below; a library of another one is not used."""


class Kind(IntEnum):
    """How the numbers of a weight lie in memory; csrc/forerun.h draws each."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT8_GROUPS = 3
    INT4_GROUPS = 4
    INT4_MINIMA = 5


INSTRUCTIONS = ("portable", "avx2", "avx512")
"""Sets of instructions, by the library's numbers."""


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
        ("reserved", c_int32),
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


_POINTER = c_void_p
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "forerun_abi": (c_int32, ()),
    "forerun_instructions": (c_int32, ()),
    "forerun_best_instructions": (c_int32, ()),
    "forerun_use_instructions": (c_int32, (c_int32,)),
    "forerun_use_openmp": (None, (c_void_p,)),
    "forerun_packed_bytes": (c_int64, (c_int32, c_int64, c_int64)),
    "forerun_pack": (None, (c_int32, c_int64, c_int64, _POINTER, _POINTER, _POINTER, _POINTER)),
    "forerun_unpack": (None, (POINTER(LinearStruct), _POINTER, c_int64, _POINTER)),
    "forerun_linear": (None, (POINTER(LinearStruct), _POINTER, c_int64, _POINTER, _POINTER, c_int32)),
    "forerun_layers": (None, (POINTER(ModelStruct), POINTER(RowsStruct), c_int32, c_int32, _POINTER, c_int32)),
    "forerun_head": (None, (POINTER(ModelStruct), c_int64, _POINTER, _POINTER, c_int32)),
    "forerun_attention": (
        None,
        (POINTER(AttentionStruct), POINTER(RowsStruct), _POINTER, _POINTER, _POINTER, _POINTER, c_int32),
    ),
}


class Library:
    """The functions of one compiled library. Calls let other Python threads run; any of them may call at once.

    Args:
        path: of the library.

    Raises:
        OSError: it cannot be loaded, or has another interface.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._functions = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            try:
                function = getattr(self._functions, name)
            except AttributeError:
                raise OSError(f"{path} lacks {name}") from None
            function.restype, function.argtypes = result, arguments
        if self._functions.forerun_abi() != ABI:
            raise OSError(f"{path} has interface {self._functions.forerun_abi()}, but this package needs {ABI}")
        self.linear = self._functions.forerun_linear
        self.layers = self._functions.forerun_layers
        self.head = self._functions.forerun_head
        self.attention = self._functions.forerun_attention
        self.pack = self._functions.forerun_pack
        self.unpack = self._functions.forerun_unpack
        self.shares_openmp = self._share_openmp()

    @classmethod
    def open(cls, path: Path) -> Library:
        """The library in a file."""
        return cls(path)

    @property
    def instructions(self) -> str:
        """The set in use, one of INSTRUCTIONS."""
        return INSTRUCTIONS[self._functions.forerun_instructions()]

    @property
    def best_instructions(self) -> str:
        """The set that the processor is best served with."""
        return INSTRUCTIONS[self._functions.forerun_best_instructions()]

    def use_instructions(self, name: str) -> bool:
        """Use another set from now on; False where the processor lacks it."""
        return bool(self._functions.forerun_use_instructions(INSTRUCTIONS.index(name)) == 0)

    def packed_bytes(self, kind: Kind, out_features: int, in_features: int) -> int:
        """Bytes of a packed weight."""
        return int(self._functions.forerun_packed_bytes(kind, out_features, in_features))

    def _share_openmp(self) -> bool:
        """Let torch's OpenMP threads compute. Two pools of threads would wait for each other's spinning: torch's go on
        spinning for milliseconds after each of its operations."""
        for found in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
            try:
                parallel = ctypes.CDLL(str(found)).GOMP_parallel  # torch has loaded this file: it is not loaded twice
            except (OSError, AttributeError):
                continue
            self._functions.forerun_use_openmp(ctypes.cast(parallel, c_void_p))
            return True
        return False
