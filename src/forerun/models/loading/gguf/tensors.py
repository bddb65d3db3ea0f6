"""A tensor of a GGUF file: its packed blocks, the numbers that they stand for, and the weights that keep them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from forerun.errors import ModelLoadError
from forerun.kernels.block_weight import BLOCK_TYPES, BlockWeight
from forerun.kernels.quantize import QuantizedFormat, QuantizedWeight
from forerun.models.loading.gguf.header import REMEDY

_PART = (1 << 15) - 256
"""Numbers dequantized together: whole blocks of every type, few enough to stay in the processor's cache, and fewer than
those from which torch converts with all threads, whose waiting for each other takes seconds on a busy machine."""
_LARGE = 1 << 16
"""Bytes from which a dequantized tensor has a memory mapping of its own."""
PLAIN_TYPES = ("F32", "F16", "BF16")
_KEPT = {"Q8_0", "Q4_0", "Q4_1"}
"""Types that `quantize` takes as they are where they have the wanted bits."""


@dataclass(frozen=True, slots=True, eq=False)
class GgufTensor:
    """A tensor that is not read yet.

    Attributes:
        name: as in the file, such as "blk.0.attn_q.weight".
        shape: in torch's order, rows first.
        type_name: of the blocks, such as "Q4_1" or "F32".
        blocks: [*shape[:-1], bytes of a row] uint8, read-only, in the file's memory map.
        content: the memory map; None: the blocks lie in memory.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    blocks: npt.NDArray[np.uint8]
    content: mmap.mmap | None = None

    def check_whole(self) -> None:
        """Check that the file is as long as it was: reading a map beyond the file's end kills the process.

        Raises:
            ModelLoadError: it has been cut off since it was opened.
        """
        if self.content is not None and self.content.size() < len(self.content):
            raise ModelLoadError(f"tensor {self.name}: the file has been cut off while it was in use. {REMEDY}")

    def release(self) -> None:
        """Give back the pages of the file that were read. They stay in the system's cache."""
        if self.content is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.content.madvise(mmap.MADV_DONTNEED)

    @property
    def is_quantized(self) -> bool:
        """Return whether a block holds several numbers with shared scales."""
        return self.type_name not in PLAIN_TYPES

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers, converted to `dtype`, in `shape`. They are computed in float32, as in llama.cpp, part by
        part: beside the result there is never more than one part."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        self.check_whole()
        kind = GGMLQuantizationType[self.type_name]
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        packed = self.blocks.reshape(-1)
        result = _empty_tensor(math.prod(self.shape), dtype)
        for first in range(0, len(result), _PART):
            last = min(first + _PART, len(result))
            start, end = (index // block_size * block_bytes for index in (first, last))
            numbers = dequantize(packed[start:end].reshape(1, -1), kind).reshape(-1)
            result[first:last] = torch.from_numpy(np.require(numbers, np.float32, "W"))
        self.release()
        return result.view(self.shape)


def _empty_tensor(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty tensor of `count` numbers. A large one has a memory mapping of its own, which returns to the
    system with the tensor: weights are read by several threads and freed by another, and the C library keeps freed
    memory for the thread that allocated it."""
    num_bytes = count * dtype.itemsize
    if num_bytes < _LARGE or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(count, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype)


def form_to_keep(type_name: str, shape: Sequence[int]) -> QuantizedFormat | None:
    """Return the format of what `weight_to_keep` returns for a tensor of this type and shape."""
    if type_name not in _KEPT or len(shape) != 2:
        return None
    form = BLOCK_TYPES[type_name]
    return QuantizedFormat(form.bits, form.zero, form.group, form.has_minimum)


def weight_to_keep(tensor: GgufTensor) -> QuantizedWeight | None:
    """Return a matrix of a type that forerun quantizes to as well, without another rounding; None for other types.

    Raises:
        ModelLoadError: a scale is NaN or infinite.
    """
    if form_to_keep(tensor.type_name, tensor.shape) is None:
        return None
    weight = block_weight(tensor)
    assert weight is not None
    try:
        values = weight.quantized()
    except ModelLoadError as error:
        raise ModelLoadError(f"tensor {tensor.name}: {error}") from None
    minimum = None if values.minimum is None else values.minimum.half()  # as the file has them
    return replace(values, scale=values.scale.half(), minimum=minimum)


def block_weight(tensor: GgufTensor, order: torch.Tensor | None = None) -> BlockWeight | None:
    """Return a matrix whose blocks are computed with as they lie in the file; None for other tensors.

    order: int64, the rows of the file that are wanted; None: all in order.
    """
    if tensor.type_name not in BLOCK_TYPES or len(tensor.shape) != 2:
        return None
    tensor.check_whole()
    return BlockWeight(tensor.type_name, (tensor.shape[0], tensor.shape[1]), tensor.blocks, order)
