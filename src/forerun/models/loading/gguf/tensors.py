"""A tensor of a GGUF file: its packed blocks, the numbers that they stand for, and their quantized values."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from forerun.errors import ModelLoadError
from forerun.kernels.quantize import GROUP, QuantizedFormat, QuantizedWeight
from forerun.models.loading.gguf.header import REMEDY

_PART = (1 << 15) - 256
"""Numbers dequantized together: whole blocks of every type, few enough to stay in the processor's cache, and fewer than
those from which torch converts with all threads, whose waiting for each other takes seconds on a busy machine."""
_LARGE = 1 << 16
"""Bytes from which a dequantized tensor has a memory mapping of its own."""
_KEPT = {"Q8_0": (8, 128), "Q4_0": (4, 8), "Q4_1": (4, 0)}
"""Types whose blocks are taken as they are -> bits, and the value that stands for 0 or for the minimum."""


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
    def is_quantized(self) -> bool:
        """Return whether a block holds several numbers with shared scales."""
        return self.type_name not in ("F32", "F16", "BF16")

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
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


def quantized_format(tensor: GgufTensor) -> QuantizedFormat | None:
    """Return the format of what `from_gguf` returns."""
    if tensor.type_name not in _KEPT or len(tensor.shape) != 2:
        return None
    return QuantizedFormat(*_KEPT[tensor.type_name], GROUP, tensor.type_name == "Q4_1")


def from_gguf(tensor: GgufTensor) -> QuantizedWeight | None:
    """Return the numbers of a matrix in Q8_0, Q4_0 or Q4_1, without another rounding; None for other types.

    Raises:
        ModelLoadError: a scale is NaN or infinite.
    """
    form = quantized_format(tensor)
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
    return QuantizedWeight(
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
