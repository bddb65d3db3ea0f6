"""The ctypes interface of the native library: structures, signatures, instruction sets and threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forerun.config import INSTRUCTIONS
from forerun.errors import NativeUnavailableError
from forerun.kernels.cpu.compiler import REMOVE, SOURCES, choose_instructions, instructions_of_bits, loading
from forerun.kernels.cpu.header import Header

HEADER = Header.read(SOURCES / "forerun.h")
"""The C interface, of which this module has all structures and functions."""
WEIGHT_KINDS = HEADER.enums["ForerunKind"]
"""By name, the numbers of the layouts of weights."""


@HEADER.structure("ForerunLinear")
class LinearStruct(Structure):
    """`ForerunLinear`."""


@HEADER.structure("ForerunRecurrence")
class RecurrenceStruct(Structure):
    """`ForerunRecurrence`."""


@HEADER.structure("ForerunState")
class StateStruct(Structure):
    """`ForerunState`."""


@HEADER.structure("ForerunExperts")
class ExpertsStruct(Structure):
    """`ForerunExperts`."""


@HEADER.structure("ForerunLatent")
class LatentStruct(Structure):
    """`ForerunLatent`."""


@HEADER.structure("ForerunLayer")
class LayerStruct(Structure):
    """`ForerunLayer`."""


@HEADER.structure("ForerunModel")
class ModelStruct(Structure):
    """`ForerunModel`."""


@HEADER.structure("ForerunEagle")
class EagleStruct(Structure):
    """`ForerunEagle`."""


@HEADER.structure("ForerunRows")
class RowsStruct(Structure):
    """`ForerunRows`."""


@HEADER.structure("ForerunAttention")
class AttentionStruct(Structure):
    """`ForerunAttention`."""


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


ABI = HEADER.constants["FORERUN_ABI"]
_LEVELS = INSTRUCTIONS[::-1]
"""By the numbers that the library gives them."""
_COMPUTING = ("linear", "forward_layers", "head", "attention", "eagle", "fuse", "context", "greedy_chains")


class Library:
    """The C++ functions. Calls release the GIL, and several threads may call at once.

    Attributes:
        path: the file.
        supported: the instruction sets that the processor has, the best first; the library may be for some of them.
        shares_openmp: whether torch's threads compute; else threads of the library's.

    The functions linear, forward_layers, head, attention, eagle, fuse, context, greedy_chains, argmax, topk,
    move_slots, pack, pack_blocks, unpack_words and unpack are those of csrc/forerun.h, with addresses for pointers.
    """

    def __init__(self, path: Path, functions: ctypes.CDLL) -> None:
        self.path = path
        self._functions = functions
        for name, (result, arguments) in HEADER.signatures().items():
            function = getattr(functions, name)
            function.restype = result
            function.argtypes = arguments
            if not hasattr(Library, attribute := name.removeprefix("forerun_")):
                setattr(self, attribute, function)
        for name in _COMPUTING:
            getattr(functions, f"forerun_{name}").errcheck = _check
        self.supported = instructions_of_bits(functions.forerun_processor_instructions())
        self._set_openmp_threads: Callable[[int], object] | None = None
        mkl = getattr(ctypes.CDLL(torch._C.__file__), "MKL_Set_Num_Threads_Local", None)  # of some of torch's builds
        self._set_mkl_threads: Callable[[int], int] = mkl or int
        self.shares_openmp = self._share_openmp()

    @classmethod
    def open(cls, path: Path) -> Library:
        """Load the library for the instruction set that FORERUN_INSTRUCTIONS names, else the best one that it has.

        Raises:
            NativeUnavailableError: it cannot be loaded, or has another interface or no such kernels.
            ConfigError: as `choose_instructions`.
        """
        with loading(path):
            functions = ctypes.CDLL(str(path))
            abi = functions.forerun_abi()
            if abi != ABI:
                raise NativeUnavailableError(f"{path} has the interface {abi}, not {ABI}.", REMOVE)
            library = cls(path, functions)
        wanted = choose_instructions(library.supported)
        if not any(library.use_instructions(name) for name in wanted):
            raise NativeUnavailableError(f"{path} has no kernels for {' or '.join(wanted)}.", REMOVE)
        return library

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return the function forerun_NAME of csrc/forerun.h."""

    @property
    def instructions(self) -> str:
        """Return the instruction set in use."""
        return _LEVELS[self._functions.forerun_instructions()]

    def use_instructions(self, name: str) -> bool:
        """Switch to another instruction set. Returns False if the processor or the library lacks it."""
        return bool(self._functions.forerun_use_instructions(_LEVELS.index(name)) == 0)

    def packed_bytes(self, kind: int, out_features: int, in_features: int, span: int = 1) -> int:
        """Return the bytes of a packed weight.

        Args:
            kind: of `WEIGHT_KINDS`.
            span: groups of 32 inputs that share scales and zeros.
        """
        return int(self._functions.forerun_packed_bytes(kind, out_features, in_features, span))

    @contextmanager
    def paced_threads(self) -> Iterator[None]:
        """As `forerun.kernels.cpu.paced_threads`."""
        most = torch.get_num_threads()
        threads = self.threads(most)
        if threads == most or self._set_openmp_threads is None:
            yield
            return
        # Of this thread alone: torch.set_num_threads is for new ones too. MKL, which computes torch.exp, has its own.
        self._set_openmp_threads(threads)
        of_mkl = self._set_mkl_threads(threads)
        try:
            yield
        finally:
            self._set_openmp_threads(most)
            self._set_mkl_threads(of_mkl)

    def _share_openmp(self) -> bool:
        """Make the kernels run on torch's OpenMP threads, and return whether that worked. Two thread pools would wait
        for each other's spinning, since torch's threads spin for milliseconds after each operation."""
        for found in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
            try:
                openmp = ctypes.CDLL(str(found))  # torch has loaded this file: it is not loaded twice
                parallel = openmp.GOMP_parallel
                self._set_openmp_threads = openmp.omp_set_num_threads
            except (OSError, AttributeError):
                continue
            self._functions.forerun_use_openmp(ctypes.cast(parallel, c_void_p))
            return True
        return False


def _check(result: int, function: object, arguments: object) -> int:
    """Raise MemoryError if a kernel reports that memory ran out. ctypes calls this with each result."""
    if result:
        raise MemoryError("the native kernels lack memory to work in")
    return result
