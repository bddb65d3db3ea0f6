"""One tensor of a GGUF file: the packed blocks as they lie in the file, and the numbers they stand for."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

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
        """Whether a block holds several numbers with scales in common."""
        return self.type_name not in ("F32", "F16", "BF16")

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """The numbers, brought to `dtype`, in `shape`. They are computed in float32, as llama.cpp does, part by part:
        beside the result there is never more than one part of it."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType[self.type_name]
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        packed = self.blocks.reshape(-1)
        result = _room_for(math.prod(self.shape), dtype)
        for first in range(0, len(result), _PART):
            last = min(first + _PART, len(result))
            start, end = (index // block_size * block_bytes for index in (first, last))
            numbers = dequantize(packed[start:end].reshape(1, -1), kind).reshape(-1)
            result[first:last] = torch.from_numpy(np.require(numbers, np.float32, "W"))
        return result.view(self.shape)


def _room_for(count: int, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor of `count` numbers. A large one has a memory mapping of its own, which goes back to the system as
    soon as nobody uses the tensor: weights are read by several threads and freed by another, and the C library keeps
    what was freed for the thread that asked for it."""
    num_bytes = count * dtype.itemsize
    if num_bytes < _LARGE or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(count, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype)
