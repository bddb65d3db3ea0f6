"""The roofline of a forward: it reads every weight once, and multiplies each with every row.

t(rows) >= max(bytes / bandwidth, 2 * parameters * rows / arithmetic), with what this machine reads and computes in a
second, measured by a sum and by a product of matrices (Williams, Waterman, Patterson 2009). Where caches hold the
weights, or kernels are faster than these, a forward can take less. Attention and the cache are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from forerun.bench.measure import timed

READ_BYTES = 1 << 28
"""Read to measure the bandwidth: more than caches hold."""
SIZE = 1024
"""Of the matrices that are multiplied."""
ROUNDS = 5
"""The best of them counts: a bound is wanted."""
BYTES = {"float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5}
"""Of a weight by its format; scales are left out."""


@dataclass(frozen=True, slots=True)
class Roof:
    """What the machine can do at most, with torch's present number of threads.

    Attributes:
        bandwidth: bytes per second that are read from memory.
        flops: by number format, floating-point operations per second.
    """

    bandwidth: float
    flops: dict[str, float]

    def seconds(self, parameters: int, number_format: str, rows: int) -> float:
        """The least time of a forward. Weights in codes are bound by the bandwidth alone: their products are
        forerun's, of whole numbers."""
        reading = parameters * BYTES[number_format] / self.bandwidth
        return max(reading, 2 * parameters * rows / self.flops[number_format] if number_format in self.flops else 0.0)


def measure_roof(formats: Sequence[str]) -> Roof:
    """Measured in a second or two."""
    with torch.inference_mode():
        block = torch.ones(READ_BYTES // 4)
        bandwidth = READ_BYTES / min(timed(block.sum).seconds for _ in range(ROUNDS + 1))
        flops = {}
        for name in formats:
            dtype = getattr(torch, name, None)
            if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
                matrix = torch.ones(SIZE, SIZE, dtype=dtype)
                product = partial(torch.matmul, matrix, matrix)
                flops[name] = 2 * SIZE**3 / min(timed(product).seconds for _ in range(ROUNDS + 1))
    return Roof(bandwidth, flops)
