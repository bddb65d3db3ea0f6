"""A GGUF file: opened, checked and mapped into memory. Tensors are read when they are used."""

from __future__ import annotations

import math
import mmap
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.kernels.quantize import GROUP, QuantisedFormat, QuantisedWeight
from forerun.models.loading.gguf.header import REMEDY, GgufHeader, read_header

_PART = 1 << 16
"""Numbers dequantised together: few enough to stay in the processor's cache."""
_LARGE = 1 << 16
"""Bytes from which a dequantised tensor has a memory mapping of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class GgufTensor:
    """A tensor that is not read yet.

    Attributes:
        name: as in the file, such as "blk.0.attn_q.weight".
        shape: in torch's order, rows first.
        type_name: of the blocks, such as "Q4_1" or "F32".
        blocks: [*shape[:-1], bytes of a row] uint8, read-only, in the file's memory map.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    blocks: npt.NDArray[np.uint8]

    @property
    def is_quantised(self) -> bool:
        """Return whether a block holds several numbers with shared scales."""
        return self.type_name not in ("F32", "F16", "BF16")

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers, converted to `dtype`, in `shape`. They are computed in float32, as in llama.cpp, part by
        part: beside the result there is never more than one part."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType[self.type_name]
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        packed = self.blocks.reshape(-1)
        result = _empty_tensor(math.prod(self.shape), dtype)
        for first in range(0, len(result), _PART):
            last = min(first + _PART, len(result))
            start, end = (index // block_size * block_bytes for index in (first, last))
            numbers = dequantize(packed[start:end].reshape(1, -1), kind).reshape(-1)
            result[first:last] = torch.from_numpy(np.require(numbers, np.float32, "W"))
        return result.view(self.shape)


def _empty_tensor(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty tensor of `count` numbers. A large one has a memory mapping of its own, which returns to the
    system with the tensor: weights are read by several threads and freed by another, and the C library keeps freed
    memory for the thread that allocated it."""
    num_bytes = count * dtype.itemsize
    if num_bytes < _LARGE or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(count, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype)


SUFFIX = ".gguf"
_SPLIT_NAME = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """An open GGUF file.

    Attributes:
        path: where it is.
        metadata: by key, values as int, float, bool, str, or lists of one of them.
        tensors: by name. Their blocks keep the file mapped.
        kinds: of the metadata's values, as `GgufHeader.kinds`.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    kinds: Mapping[str, tuple[int, ...]]

    @classmethod
    def open(cls, path: str | Path) -> GgufFile:
        """Open a file and check its header. The file must not be changed while it is open.

        Raises:
            ModelLoadError: it cannot be read, is no GGUF file, damaged, or cut off.
            UnsupportedModelError: it is one of several parts, or holds tensors of a type that is not read here.
        """
        path = Path(path)
        content = _mapped(path)
        header = read_header(memoryview(content), str(path))
        _refuse_part(path, header)
        packed = np.frombuffer(content, np.uint8)
        tensors = {
            info.name: GgufTensor(
                info.name,
                info.shape,
                info.type_name,
                packed[info.start : info.start + info.num_bytes].reshape(*info.shape[:-1], -1),
            )
            for info in header.tensors
        }
        return cls(path, MappingProxyType(dict(header.metadata)), MappingProxyType(tensors), header.kinds)


def _mapped(path: Path) -> mmap.mmap:
    """Map a regular file into memory, read-only."""
    try:
        # opening a pipe would wait for its other end
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("it is not a regular file")
            if os.fstat(descriptor).st_size == 0:
                raise ValueError("it is empty")
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as failure:  # ValueError: a path with a null character
        reason = getattr(failure, "strerror", None) or failure
        raise ModelLoadError(f"{path}: it cannot be read: {reason}. {REMEDY}") from None


def _refuse_part(path: Path, header: GgufHeader) -> None:
    """Raise UnsupportedModelError for one of several files of a model, by metadata or by name."""
    named = _SPLIT_NAME.search(path.name)
    num_parts = header.metadata.get("split.count", int(named[1]) if named else 1)
    if num_parts not in (0, 1):
        raise UnsupportedModelError(
            f"{path}: it is one of {num_parts} parts of a model, which forerun does not put together. Join them: "
            "llama-gguf-split --merge FIRST-PART MODEL.gguf."
        )


_KEPT = {"Q8_0": (8, 128), "Q4_0": (4, 8), "Q4_1": (4, 0)}
"""Types whose blocks are taken as they are -> bits, and the value that stands for 0 or for the minimum."""


def quantised_format(tensor: GgufTensor) -> QuantisedFormat | None:
    """Return the format of what `from_gguf` returns."""
    if tensor.type_name not in _KEPT or len(tensor.shape) != 2:
        return None
    return QuantisedFormat(*_KEPT[tensor.type_name], GROUP, tensor.type_name == "Q4_1")


def from_gguf(tensor: GgufTensor) -> QuantisedWeight | None:
    """Return the numbers of a matrix in Q8_0, Q4_0 or Q4_1, without another rounding; None for other types.

    Raises:
        ModelLoadError: a scale is NaN or infinite.
    """
    form = quantised_format(tensor)
    if form is None:
        return None
    blocks = tensor.blocks.reshape(tensor.shape[0], tensor.shape[1] // GROUP, -1)
    num_scales = 2 if form.has_minimum else 1
    scales = _copy(blocks[..., : 2 * num_scales]).view(np.float16)
    if not np.isfinite(scales).all():
        raise ModelLoadError(f"tensor {tensor.name} has a scale that is NaN or infinite. {REMEDY}")
    packed = blocks[..., 2 * num_scales :]
    # int8 about 0 becomes uint8 about 128; the low halves of a block's bytes stand before the high ones
    if form.bits == 8:
        quantized = packed ^ np.uint8(128)
    else:
        quantized = np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], -1)
    return QuantisedWeight(
        form.bits,
        torch.from_numpy(quantized.reshape(tensor.shape)),
        form.zero,
        torch.from_numpy(_copy(scales[..., 0])),
        torch.from_numpy(_copy(scales[..., 1])) if num_scales == 2 else None,
        GROUP,
    )


def _copy(array: np.ndarray) -> np.ndarray:
    """Return a contiguous, writable copy."""
    return np.array(array, order="C", copy=True)
