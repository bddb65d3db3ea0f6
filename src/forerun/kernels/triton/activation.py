"""The feed-forward layer's activation: silu(gate) * up."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _gated(sums, out, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    start = sums + row.to(tl.int64) * 2 * WIDTH + columns
    gate = tl.load(start, inside, 0.0)
    up = tl.load(start + WIDTH, inside, 0.0)
    for _ in range(1, SPLITS):
        start += num_rows.to(tl.int64) * 2 * WIDTH
        gate += tl.load(start, inside, 0.0)
        up += tl.load(start + WIDTH, inside, 0.0)
    activated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + columns, activated.to(out.dtype.element_ty), inside)


def gated(sums: Tensor, out: Tensor) -> None:
    """out = silu(gate) * up.

    Args:
        sums: [splits, rows, 2 * width] float32, gate and up of each row side by side; splits are added in order.
        out: [rows, width] of any float type.
    """
    rows, width = out.shape
    block = min(_BLOCK, triton.next_power_of_2(width))
    _gated[(rows, triton.cdiv(width, block))](sums, out, rows, WIDTH=width, BLOCK=block, SPLITS=len(sums), num_warps=4)
