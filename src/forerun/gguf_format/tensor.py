"""One tensor of a GGUF file: the packed blocks as they lie in the file, and the numbers they stand for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_PART = 1 << 18
"""Numbers dequantised together: few enough to stay in the processor's cache."""


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
        result = torch.empty(math.prod(self.shape), dtype=dtype)
        for first in range(0, len(result), _PART):
            last = min(first + _PART, len(result))
            start, end = (index // block_size * block_bytes for index in (first, last))
            numbers = dequantize(packed[start:end].reshape(1, -1), kind).reshape(-1)
            result[first:last] = torch.from_numpy(np.require(numbers, np.float32, "W"))
        return result.view(self.shape)
