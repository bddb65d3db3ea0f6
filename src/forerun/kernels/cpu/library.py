"""The ctypes interface of the native library: structures, signatures, instruction sets and threads."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from forerun.config import INSTRUCTIONS, INSTRUCTIONS_VARIABLE, environment_choice
from forerun.errors import ConfigError, NativeUnavailableError
from forerun.utils.home import HOME_VARIABLE

# The structures of the C interface (`csrc/forerun.h`), field by field.


class WeightLayout(IntEnum):
    """How the numbers of a weight lie in memory, as csrc/forerun.h defines it."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT8_GROUPS = 3
    INT4_GROUPS = 4
    INT4_MINIMA = 5
    Q5_0 = 6
    Q5_1 = 7
    Q4_K = 8
    Q5_K = 9
    Q6_K = 10
    IQ4_NL = 11
    IQ4_XS = 12
    MXFP4 = 13
    INT4_ZEROS = 14
    INT8_ZEROS = 15


class LinearStruct(Structure):
    """`ForerunLinear`."""

    _fields_ = [
        ("kind", c_int32),
        ("out_features", c_int32),
        ("in_features", c_int32),
        ("activation_bits", c_int32),
        ("packed", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("span", c_int64),
    ]


class RecurrenceStruct(Structure):
    """`ForerunRecurrence`."""

    _fields_ = [
        *((name, LinearStruct) for name in ("mixed", "gate", "beta", "decay", "out")),
        *((name, c_void_p) for name in ("taps", "taps_bias", "rate", "step_bias", "skip", "norm")),
        ("state_at", c_int64),
        ("record_at", c_int64),
        *((name, c_int32) for name in ("kind", "num_taps", "channels", "heads", "key_heads", "key_width")),
        *((name, c_int32) for name in ("value_width", "query_at", "key_at", "value_at", "norm_width", "gates_first")),
        ("heads_are_tiled", c_int32),
        *((name, c_float) for name in ("norm_eps", "beta_scale", "least_step", "most_step")),
        *((name, c_float) for name in ("gate_scale", "step_scale", "out_scale")),
        ("reserved", c_int32),
    ]


class StateStruct(Structure):
    """`ForerunState`."""

    _fields_ = [
        *((name, c_void_p) for name in ("state", "tip", "records", "parents", "pending", "folded")),
        *((name, c_int32) for name in ("num_pending", "num_whole", "first_slot", "reserved")),
    ]


class ExpertsStruct(Structure):
    """`ForerunExperts`."""

    _fields_ = [
        ("router", LinearStruct),
        ("shared_switch", LinearStruct),
        *((name, c_void_p) for name in ("gate", "up", "down", "bias", "curve", "num_read", "num_given")),
        *((name, c_int32) for name in ("count", "top", "width", "scoring", "groups", "top_groups", "adds_to_one")),
        ("least_sum", c_float),
        ("scale", c_float),
        ("best", c_int32),
        ("distance", c_float),
        *((name, c_void_p) for name in ("router_norm", "norm", "shared_norm", "mixed_norm", "share_scales")),
    ]


class LatentStruct(Structure):
    """`ForerunLatent`."""

    _fields_ = [
        ("entry", LinearStruct),
        *((name, c_void_p) for name in ("entry_norm", "norm", "absorb", "expand")),
        ("eps", c_float),
        ("reserved", c_int32),
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
        ("rotation", c_int32),
        ("attention_norm", c_void_p),
        ("feed_norm", c_void_p),
        ("input_bias", c_void_p),
        ("mlp_bias", c_void_p),
        ("curve", c_void_p),
        ("attention_gate", LinearStruct),
        ("recurrence", c_void_p),
        *((name, c_int32) for name in ("num_kv_heads", "head_dim", "rotated", "key_width", "value_width")),
        ("feed_scale", c_float),
        ("experts", c_void_p),
        ("sinks", c_void_p),
        ("latent", c_void_p),
        ("keys_at", c_int64),
        ("value_norm", c_void_p),
        ("output_scale", c_void_p),
        ("token_gate", LinearStruct),
        ("token_out", LinearStruct),
        ("token_norm", c_void_p),
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
        ("page", c_int32),
        ("cache_format", c_int32),
        ("eps", c_float),
        ("scale", c_float),
        ("norm_bias", c_void_p),
        ("activation", c_int32),
        ("has_layer_norms", c_int32),
        ("is_parallel", c_int32),
        ("has_wide_norms", c_int32),
        ("norms_rotated", c_int32),
        ("softcap", c_float),
        ("residual_scale", c_float),
        ("logit_scale", c_float),
        ("logit_softcap", c_float),
        ("query_growth", c_float),
        ("query_period", c_int32),
        ("record_size", c_int64),
        *((name, c_float) for name in ("attention_scale", "activation_scale")),
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
        ("other_cosines", c_void_p),
        ("other_sines", c_void_p),
        ("states", c_void_p),
        ("token_inputs", c_void_p),
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
        ("cache_format", c_int32),
        ("window", c_int32),
        ("reserved", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
    ]


def plain_fields(struct: Structure) -> tuple[object, ...]:
    """Return the fields of a structure in order, with those of structures in it: of an address, whether there is
    one."""
    found: list[object] = []
    for name, kind in struct._fields_:  # type: ignore[misc]
        value = getattr(struct, name)
        if isinstance(value, Structure):
            found += plain_fields(value)
        else:
            found.append(value if kind in (c_int32, c_int64, c_float) else bool(value))
    return tuple(found)


ABI = 22
"""FORERUN_ABI of csrc/forerun.h."""
_LEVELS = INSTRUCTIONS[::-1]
"""By the numbers that the library gives them."""
_REMEDY = "Remove it, so that it is made anew."
_ELSEWHERE = f"Let the variable {HOME_VARIABLE} name a folder where programs may be executed."
_POINTER = c_void_p
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "forerun_abi": (c_int32, ()),
    "forerun_instructions": (c_int32, ()),
    "forerun_best_instructions": (c_int32, ()),
    "forerun_use_instructions": (c_int32, (c_int32,)),
    "forerun_use_openmp": (None, (c_void_p,)),
    "forerun_workspace_bytes": (c_int64, ()),
    "forerun_packed_bytes": (c_int64, (c_int32, c_int64, c_int64, c_int64)),
    "forerun_pack": (None, (c_int32, *(c_int64,) * 3, *(_POINTER,) * 4, c_int32)),
    "forerun_pack_blocks": (c_int64, (c_int32, c_int64, c_int64, _POINTER, c_int64, _POINTER, _POINTER, c_int32)),
    "forerun_unpack_words": (None, (_POINTER, *(c_int64,) * 4, c_int32, _POINTER, c_int32)),
    "forerun_unpack": (None, (POINTER(LinearStruct), _POINTER, c_int64, _POINTER)),
    "forerun_linear": (c_int32, (POINTER(LinearStruct), _POINTER, c_int64, _POINTER, _POINTER, c_int32)),
    "forerun_layers": (
        c_int32,
        (POINTER(ModelStruct), POINTER(RowsStruct), c_int32, c_int32, *[_POINTER] * 2, c_int32, _POINTER, c_int32),
    ),
    "forerun_head": (c_int32, (POINTER(ModelStruct), c_int64, _POINTER, _POINTER, c_int32)),
    "forerun_move_slots": (
        None,
        (_POINTER, _POINTER, _POINTER, c_int32, c_int32, c_int32, _POINTER, c_int64, c_int64),
    ),
    "forerun_attention": (
        c_int32,
        (POINTER(AttentionStruct), POINTER(RowsStruct), _POINTER, _POINTER, _POINTER, _POINTER, c_int32),
    ),
    "forerun_eagle": (
        c_int32,
        (POINTER(EagleStruct), POINTER(RowsStruct), *[_POINTER] * 3, c_int64, _POINTER, _POINTER, c_int32),
    ),
    "forerun_fuse": (
        c_int32,
        (POINTER(LinearStruct), _POINTER, c_int32, c_float, _POINTER, c_int64, _POINTER, c_int32),
    ),
    "forerun_context": (c_int32, (POINTER(ModelStruct), _POINTER, POINTER(RowsStruct), _POINTER, c_int32)),
    "forerun_greedy_chains": (c_int32, (POINTER(LinearStruct), *[_POINTER] * 5, c_int64, _POINTER, c_int32)),
    "forerun_pick": (None, (_POINTER, c_int64, c_int64, c_int64, _POINTER, _POINTER)),
    "forerun_top": (None, (_POINTER, c_int64, c_int64, c_int64, _POINTER)),
}
_COMPUTING = ("linear", "layers", "head", "attention", "eagle", "fuse", "context", "greedy_chains")


class Library:
    """The C++ functions. Calls release the GIL, and several threads may call at once.

    Attributes:
        path: the file.
        best: the best instruction set that the processor has.
        shares_openmp: whether torch's threads compute; else threads of the library's.

    The functions linear, layers, head, attention, eagle, fuse, context, greedy_chains, pick, top, move_slots,
    pack, pack_blocks, unpack_words and unpack are those of csrc/forerun.h, with addresses for pointers.
    """

    def __init__(self, path: Path, functions: ctypes.CDLL) -> None:
        self.path = path
        self._functions = functions
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(functions, name)
            function.restype, function.argtypes = result, arguments
        for name in _COMPUTING:
            getattr(functions, f"forerun_{name}").errcheck = _check
        self.best = _LEVELS[functions.forerun_best_instructions()]
        self.shares_openmp = self._share_openmp()

    @classmethod
    def open(cls, path: Path) -> Library:
        """Load the library for the instruction set that FORERUN_INSTRUCTIONS names, else the best one.

        Raises:
            NativeUnavailableError: it cannot be loaded, or has another interface.
            ConfigError: the processor lacks what FORERUN_INSTRUCTIONS names, or there is no such instruction set.
        """
        try:
            functions = ctypes.CDLL(str(path))
            abi = functions.forerun_abi()
            if abi != ABI:
                raise NativeUnavailableError(f"{path} has the interface {abi}, not {ABI}.", _REMEDY)
            library = cls(path, functions)
        except (OSError, AttributeError) as failure:
            if _is_noexec(path):
                reason = f"{path} cannot be loaded: its file system is mounted without permission to execute (noexec)."
                raise NativeUnavailableError(reason, _ELSEWHERE) from None
            raise NativeUnavailableError(f"{path} cannot be loaded: {failure}.", _REMEDY) from None
        chosen = choose_instructions(library.best)
        if not library.use_instructions(chosen):  # a processor with AVX-512 may lack AVX-VNNI
            raise ConfigError(f"{INSTRUCTIONS_VARIABLE} is {chosen!r}, which this processor lacks. Unset it.")
        return library

    def __getattr__(self, name: str) -> Any:
        """Return the function forerun_NAME of csrc/forerun.h."""
        return getattr(self._functions, f"forerun_{name}")

    @property
    def instructions(self) -> str:
        """Return the instruction set in use."""
        return _LEVELS[self._functions.forerun_instructions()]

    def use_instructions(self, name: str) -> bool:
        """Switch to another instruction set. Returns False if the processor lacks it."""
        return bool(self._functions.forerun_use_instructions(_LEVELS.index(name)) == 0)

    def packed_bytes(self, kind: WeightLayout, out_features: int, in_features: int, span: int = 1) -> int:
        """Return the bytes of a packed weight. span: groups of 32 inputs that share scales and zeros."""
        return int(self._functions.forerun_packed_bytes(kind, out_features, in_features, span))

    def _share_openmp(self) -> bool:
        """Make the kernels run on torch's OpenMP threads, and return whether that worked. Two thread pools would wait
        for each other's spinning, since torch's threads spin for milliseconds after each operation."""
        for found in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
            try:
                parallel = ctypes.CDLL(str(found)).GOMP_parallel  # torch has loaded this file: it is not loaded twice
            except (OSError, AttributeError):
                continue
            self._functions.forerun_use_openmp(ctypes.cast(parallel, c_void_p))
            return True
        return False


def _is_noexec(path: Path) -> bool:
    """Return whether the file system of `path` forbids executing and loading files."""
    try:
        return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
    except (OSError, AttributeError):  # AttributeError: systems without this flag
        return False


def _check(result: int, function: object, arguments: object) -> int:
    """Raise MemoryError if a kernel reports that memory ran out. ctypes calls this with each result."""
    if result:
        raise MemoryError("the native kernels lack memory to work in")
    return result


def choose_instructions(best: str) -> str:
    """Return the instruction set that FORERUN_INSTRUCTIONS names, else the best one of the processor.

    Raises:
        ConfigError: the processor lacks it, or there is no such instruction set.
    """
    chosen = environment_choice(INSTRUCTIONS_VARIABLE, INSTRUCTIONS) or best
    if INSTRUCTIONS.index(chosen) < INSTRUCTIONS.index(best):
        raise ConfigError(
            f"{INSTRUCTIONS_VARIABLE} is {chosen!r}, but this processor has {best} at best. Give that, or unset it."
        )
    return chosen
