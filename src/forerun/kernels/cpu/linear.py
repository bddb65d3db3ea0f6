"""The matrix product of the native kernels: weights of 32, 16, 8 or 4 bits, read from memory once per step.

A row's result does not depend on the other rows, whatever their number. Float weights are multiplied with float32
activations, even and odd inputs apart, each in order; quantized weights as `kernels/torch/linear.py` defines.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from forerun.errors import ModelLoadError
from forerun.kernels.block_weight import BlockType, BlockWeight, non_finite_row
from forerun.kernels.cpu.library import WEIGHT_KINDS, Library, LinearStruct
from forerun.kernels.quantize import GROUP, QuantizedFormat, QuantizedWeight

# Memory for packed weights, in pages of two megabytes if the system has them.
#
# A step reads every weight once. With pages of four kilobytes the processor translates an address for each page, and
# twice in a virtual machine.

_CHUNK = 1 << 27
"""Bytes that are mapped together. What is not written takes no memory, but for the rest of the last large page."""
_LARGE_PAGE = 1 << 21
_ALIGNMENT = 64
"""Bytes: a line of the processor's cache."""

_lock = threading.Lock()
_chunks: dict[Path | None, tuple[Tensor, int]] = {}  # by the folder of its file, the present one and what is used
_experts: ContextVar[Path | None] = ContextVar("experts", default=None)
_folder: ContextVar[Path | None] = ContextVar("folder", default=None)


@contextmanager
def _set(variable: ContextVar[Path | None], folder: Path | None) -> Iterator[None]:
    token = variable.set(folder)
    try:
        yield
    finally:
        variable.reset(token)


def experts_in(folder: Path | None) -> AbstractContextManager[None]:
    """Let the experts of models that are loaded in a context lie in this folder; None: in memory."""
    return _set(_experts, folder)


def expert_memory() -> AbstractContextManager[None]:
    """Let weights that are packed in a context lie where experts lie."""
    return _set(_folder, _experts.get())


def weight_memory(nbytes: int) -> Tensor:
    """Return [nbytes] uint8, uninitialised and aligned to a cache line. A chunk of memory returns to the system when
    all tensors in it are gone.

    Raises:
        ModelLoadError: experts lie on a disk, and it is full.
    """
    folder = _folder.get()
    with _lock:
        chunk, used = _chunks.get(folder, (torch.empty(0, dtype=torch.uint8), 0))
        start = -(-used // _ALIGNMENT) * _ALIGNMENT
        if start + nbytes > len(chunk):
            new = _mapped(max(_CHUNK, nbytes)) if folder is None else _mapped_file(folder, max(_CHUNK, nbytes))
            if nbytes >= _CHUNK:
                return new[:nbytes]
            chunk = new
            start = 0
        _chunks[folder] = chunk, start + nbytes
        return chunk[start : start + nbytes]


def _mapped_file(folder: Path, nbytes: int) -> Tensor:
    """Return memory of a file without a name. The system keeps in memory what is read most of it."""
    try:
        with TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, nbytes)  # a full disk would end the process later
            elif shutil.disk_usage(folder).free < nbytes:  # macOS would make a file with a hole
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            else:
                file.truncate(nbytes)
            return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
    except OSError as error:
        raise ModelLoadError(
            f"The experts' weights do not fit into memory, and a file of {nbytes:,} bytes for them cannot be made in "
            f"{folder}: {error.strerror}. Free space there, or name another folder in FORERUN_HOME."
        ) from None


def _mapped(nbytes: int) -> Tensor:
    if sys.platform == "win32":
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with suppress(OSError):  # a kernel that was built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


_LANES = 16
"""Outputs in a block."""


class NativeLinear(nn.Module):
    """y = x W^T + b, computed in float32.

    Args:
        weight: [out, in], float32, bfloat16, quantized or in blocks of a GGUF file. bias: [out] or None.

    Attributes:
        struct: the layer in the library's form.
        packed: uint8, the weight as kernels read it.
        is_on_disk: it lies in a file, of which memory holds a part.
        nbytes: of the packed weight, scales included.
        bias: float32, whole blocks long, or None.

    Raises:
        ModelLoadError: a scale of a GGUF file's blocks is NaN or infinite. The message names the row alone.
    """

    def __init__(
        self, library: Library, weight: Tensor | QuantizedWeight | BlockWeight, bias: Tensor | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.kind = weight_layout(weight.dtype if isinstance(weight, Tensor) else weight.form)
        self._library = library
        self._span = span_of(weight.form) if not isinstance(weight, Tensor) else 1
        factor = None
        if isinstance(weight, QuantizedWeight) and weight.group is None:
            factor = weight.scale[:, 0]
        elif isinstance(weight, QuantizedWeight) and isinstance(weight.zero, Tensor):
            halves, factor = _in_float16(weight.scale)
            weight = replace(weight, scale=halves)
        self.is_on_disk = _folder.get() is not None
        self.packed = _packed(library, self.kind, weight, self._span)
        self._scales = None if factor is None else _padded(factor)
        self.bias = None if bias is None else _padded(bias.detach())
        self.nbytes = self.packed.nbytes + (0 if self._scales is None else self._scales.nbytes)
        self.struct = LinearStruct(
            kind=self.kind,
            out_features=self.out_features,
            in_features=self.in_features,
            activation_bits=0 if isinstance(weight, Tensor) else weight.activation_bits,
            packed=self.packed.data_ptr(),
            scales=None if self._scales is None else self._scales.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            span=self._span,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b. x: [..., in] -> [..., out] in x's type."""
        return self._product(x, None).to(x.dtype)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + forward(x), added in float32. residual: [..., out]."""
        return self._product(x, residual.float().contiguous()).to(residual.dtype)

    def rows(self, index: Tensor) -> Tensor:
        """Return rows of the weight, as an embedding lookup does. index: [n] int64 -> [n, in] float32.

        Raises:
            IndexError: there is no such row.
        """
        numbers = torch.empty(len(index), self.in_features)
        self.read_rows(index.contiguous().numpy(), numbers)
        return numbers

    def read_rows(self, index: NDArray[np.int64], numbers: Tensor) -> None:
        """Write `rows` into the first rows of `numbers`, [n or more, in] float32. index: [n], contiguous."""
        _check_rows(index, self.out_features)
        self._library.unpack(ctypes.byref(self.struct), index.ctypes.data, len(index), numbers.data_ptr())

    def last_outputs(self, count: int) -> LinearStruct:
        """Return the layer of the last `count` outputs, to which up to 15 before them are added, on this one's
        memory."""
        first = max(0, self.out_features - count) // _LANES * _LANES
        return self.outputs(first, self.out_features - first)

    def outputs(self, first: int, count: int) -> LinearStruct:
        """Return the layer of some outputs on this one's memory. first: a multiple of 16."""
        part = LinearStruct.from_buffer_copy(self.struct)
        part.out_features = count
        part.packed += self._library.packed_bytes(self.kind, first, self.in_features, self._span)
        for name in ("scales", "bias"):
            if (address := getattr(part, name)) is not None:
                setattr(part, name, address + first * torch.float32.itemsize)
        return part

    def of_blocks(self, blocks: NDArray[np.int32]) -> LinearStruct:
        """Return the layer of some blocks of 16 outputs on this one's memory, those beyond `out_features` left out.

        Args:
            blocks: which, rising; the array must live as long as the structure.
        """
        part = LinearStruct.from_buffer_copy(self.struct)
        part.out_features = len(blocks) * _LANES - max(0, (int(blocks[-1]) + 1) * _LANES - self.out_features)
        part.blocks = blocks.ctypes.data
        return part

    def float_numbers(self) -> Tensor | None:
        """Return the packed numbers of a float weight, or None for a quantized one."""
        if self.kind not in (WEIGHT_KINDS["FLOAT32"], WEIGHT_KINDS["BFLOAT16"]):
            return None
        return self.packed.view(torch.float32 if self.kind == WEIGHT_KINDS["FLOAT32"] else torch.bfloat16)

    def _product(self, x: Tensor, residual: Tensor | None) -> Tensor:
        rows = x.reshape(-1, self.in_features).float().contiguous()
        y = torch.empty(len(rows), self.out_features)
        self._library.linear(
            ctypes.byref(self.struct),
            rows.data_ptr(),
            len(rows),
            None if residual is None else residual.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y.view(*x.shape[:-1], self.out_features)


Form: TypeAlias = QuantizedFormat | BlockType | torch.dtype
"""Of a quantized weight, of a GGUF file's blocks, or the dtype of numbers, bfloat16 or float32."""


def with_page_ends(nbytes: int) -> int:
    """Return the memory that packed weights of so many bytes take, where every chunk ends within a large page."""
    return nbytes + _LARGE_PAGE * (nbytes // _CHUNK)


def linear_nbytes(library: Library, out_features: int, in_features: int, form: Form) -> int:
    """Return the bytes of a layer's packed weight without the bias."""
    has_channel_scales = not isinstance(form, torch.dtype) and (form.group is None or form.zero is None)
    scales = 4 * -(-out_features // _LANES) * _LANES if has_channel_scales else 0
    span = 1 if isinstance(form, torch.dtype) else span_of(form)
    return library.packed_bytes(weight_layout(form), out_features, in_features, span) + scales


def span_of(form: QuantizedFormat | BlockType) -> int:
    """Return the groups of 32 inputs that share scales and zeros; 1 for weights without zeros of groups."""
    return 1 if form.zero is not None or form.group is None else form.group // GROUP


def _in_float16(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales of groups as float16, and what these are multiplied by in each row: a power of 2 that brings its
    largest to 2^15, or else the scale of a single group.

    Args:
        scale: [out, groups] float32.

    Returns:
        [out, groups] float16; [out] float32.

    Raises:
        ModelLoadError: float16 does not hold what is left of a scale.
    """
    _, exponent = scale.abs().amax(1, keepdim=True).frexp()
    factor = torch.ldexp(torch.ones_like(scale[:, :1]), exponent - 16)
    halves = (scale / factor).half()
    if scale.shape[1] == 1 and not torch.equal(halves.float() * factor, scale):
        halves = torch.ones_like(halves)
        factor = scale
    if not torch.equal(halves.float() * factor, scale):
        raise ModelLoadError("its scales differ too much for float16. Load the model with quantize='none'.")
    return halves, factor[:, 0]


def weight_layout(form: Form) -> int:
    """Return the number of the layout of a weight of this form."""
    return WEIGHT_KINDS[_layout_name(form)]


def _layout_name(form: Form) -> str:
    if isinstance(form, torch.dtype):
        return "FLOAT32" if form == torch.float32 else "BFLOAT16"
    if isinstance(form, BlockType):
        return form.layout or form.name
    if form.zero is None:
        return "INT8_ZEROS" if form.bits == 8 else "INT4_ZEROS"
    if form.bits == 8:
        return "INT8" if form.group is None else "INT8_GROUPS"
    return "INT4_MINIMA" if form.has_minimum else "INT4_GROUPS"


def _packed(library: Library, kind: int, weight: Tensor | QuantizedWeight | BlockWeight, span: int) -> Tensor:
    """Pack a weight for the library. Returns [bytes] uint8."""
    packed = weight_memory(library.packed_bytes(kind, weight.shape[0], weight.shape[1], span))
    if isinstance(weight, BlockWeight):
        _pack_blocks(library, kind, weight, packed)
        return packed
    quantized = weight if isinstance(weight, QuantizedWeight) else None
    numbers = (quantized.quantized if quantized is not None else weight.detach()).contiguous()  # type: ignore[union-attr]
    beside = []
    if quantized is not None and quantized.group is not None:
        found = (quantized.scale, quantized.minimum, quantized.zero)
        beside = [each.contiguous() for each in found if isinstance(each, Tensor)]
    pointers = [each.data_ptr() for each in beside] + [None] * (2 - len(beside))
    library.pack(kind, *weight.shape, span, numbers.data_ptr(), *pointers, packed.data_ptr(), torch.get_num_threads())
    return packed


def _pack_blocks(library: Library, kind: int, weight: BlockWeight, packed: Tensor) -> None:
    blocks = np.ascontiguousarray(weight.blocks)
    order = None
    if weight.order is not None:
        order = weight.order.contiguous().numpy()
        _check_rows(order, len(blocks))
    row = library.pack_blocks(
        kind,
        *weight.shape,
        blocks.ctypes.data,
        blocks.shape[1],
        None if order is None else order.ctypes.data,
        packed.data_ptr(),
        torch.get_num_threads(),
    )
    if row:
        raise non_finite_row(row - 1)


def _check_rows(index: NDArray[np.int64], count: int) -> None:
    # as numbers without sign, negative ones are too large
    if len(index) and index.view(np.uint64).max() >= count:
        raise IndexError(f"a row is not in 0..{count - 1}: {index.tolist()}")


def _padded(x: Tensor) -> Tensor:
    """Convert to float32 and pad to whole blocks."""
    return F.pad(x.float(), (0, -len(x) % _LANES)).contiguous()
