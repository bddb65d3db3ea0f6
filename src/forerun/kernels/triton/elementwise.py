"""Element-wise Triton kernels: the feed-forward activation, and residual addition with the root-mean-square norm."""

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
    """Write silu(gate) * up to `out`.

    Args:
        sums: [splits, rows, 2 * width] float32, gate and up of each row side by side; splits are added in order.
        out: [rows, width] of any float type.
    """
    rows, width = out.shape
    block = min(_BLOCK, triton.next_power_of_2(width))
    _gated[(rows, triton.cdiv(width, block))](sums, out, rows, WIDTH=width, BLOCK=block, SPLITS=len(sums), num_warps=4)


@triton.jit
def _add_and_norm(
    x,
    sums,
    bias,
    weight,
    out,
    num_rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    numbers = tl.load(x + row * WIDTH + columns, inside, 0.0)
    if SPLITS > 0:
        total = tl.load(sums + row * WIDTH + columns, inside, 0.0)
        for split in range(1, SPLITS):
            total += tl.load(sums + (split * num_rows + row) * WIDTH + columns, inside, 0.0)
        if HAS_BIAS:
            total += tl.load(bias + columns, inside, 0.0)
        numbers += total
        tl.store(x + row * WIDTH + columns, numbers, inside)
    if HAS_NORM:
        mean = tl.sum(numbers * numbers) / WIDTH
        normed = numbers * tl.rsqrt(mean + eps) * tl.load(weight + columns, inside, 0.0)
        tl.store(out + row * WIDTH + columns, normed.to(out.dtype.element_ty), inside)


def add_and_norm(
    x: Tensor,
    sums: Tensor | None = None,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    out: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Add a product's splits and the bias to x in place; write the norm of x, times weight, to `out`.

    Args:
        x: [rows, hidden] float32, changed in place.
        sums: [splits, rows, hidden] float32; None: nothing is added. bias: [hidden] float32.
        weight: [hidden] float32; None: no norm. out: [rows, hidden] of any float type.
    """
    rows, width = x.shape
    _add_and_norm[(rows,)](
        x,
        x if sums is None else sums,
        x if bias is None else bias,
        x if weight is None else weight,
        x if out is None else out,
        rows,
        eps,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        SPLITS=0 if sums is None else len(sums),
        HAS_BIAS=bias is not None,
        HAS_NORM=weight is not None,
        num_warps=4 if width <= 4096 else 8,
    )
