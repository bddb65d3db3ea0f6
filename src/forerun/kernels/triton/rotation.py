"""The Triton kernel that normalises, rotates and writes the queries, keys and values of one layer."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.cpu.page_layout import PAGE
from forerun.kernels.triton.step_arrays import LINE, row_start

_POSITION = tl.constexpr(row_start("position"))
_PAGE_OF_ROW = tl.constexpr(row_start("page"))
_SLOT = tl.constexpr(row_start("slot"))
_TILE_OF_ROW = tl.constexpr(row_start("tile"))
_PAGE = tl.constexpr(PAGE)
_BLOCK_HEADS = tl.constexpr(8)


@dataclass(frozen=True, slots=True, eq=False)
class RotationTables:
    """Cosines and sines of the rotation: [positions, D / 2] float32 on the device.

    Attributes:
        cos, sin: of the angle by which numbers i and i + D / 2 of a head are turned.
    """

    cos: Tensor
    sin: Tensor


@triton.jit
def _half(start, stride, bias, offsets, inside, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Add the splits of one half of each head in order, then the bias."""
    total = tl.load(start + offsets, inside, 0.0)
    for split in range(1, SPLITS):
        total += tl.load(start + split * stride + offsets, inside, 0.0)
    if HAS_BIAS:
        total += tl.load(bias + offsets, inside, 0.0)
    return total


@triton.jit
def _normed(left, right, norms, heads, pairs, inside, eps, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Normalise each head. Values have no norm; the result computed for them is not read."""
    mean = (tl.sum(left * left, 1) + tl.sum(right * right, 1)) / WIDTH
    inverse = tl.rsqrt(mean + eps)[:, None]
    weights = norms + tl.where(heads < HEADS, 0, 1)[:, None] * WIDTH + pairs[None, :]
    left = left * inverse * tl.load(weights, inside, 0.0)
    return left, right * inverse * tl.load(weights + WIDTH // 2, inside, 0.0)


@triton.jit
def _rotate_and_write(
    sums,
    bias,
    norms,
    cos,
    sin,
    words,
    query,
    base,
    num_rows,
    layer_start,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    LINE_NUMBERS: tl.constexpr,
):
    row = tl.program_id(0)
    if tl.load(words + _TILE_OF_ROW + row) >= 0:
        heads = tl.program_id(1) * _BLOCK_HEADS + tl.arange(0, _BLOCK_HEADS)
        pairs = tl.arange(0, BLOCK)
        ALL: tl.constexpr = (HEADS + 2 * KV_HEADS) * WIDTH
        HALF: tl.constexpr = WIDTH // 2
        offsets = heads[:, None] * WIDTH + pairs[None, :]
        inside = (offsets < ALL) & (pairs < HALF)[None, :]
        start = sums + row.to(tl.int64) * ALL
        stride = num_rows.to(tl.int64) * ALL
        left = _half(start, stride, bias, offsets, inside, SPLITS, HAS_BIAS)
        right = _half(start + HALF, stride, bias + HALF, offsets, inside, SPLITS, HAS_BIAS)
        is_value = (heads >= HEADS + KV_HEADS)[:, None]
        # of queries and keys
        new_left = left
        new_right = right
        if HAS_NORM:
            new_left, new_right = _normed(left, right, norms, heads, pairs, inside, eps, HEADS, WIDTH)
        turn = tl.load(words + _POSITION + row) * HALF + pairs
        by_cos = tl.load(cos + turn, pairs < HALF, 0.0)[None, :]
        by_sin = tl.load(sin + turn, pairs < HALF, 0.0)[None, :]
        left = tl.where(is_value, left, new_left * by_cos - new_right * by_sin).to(query.dtype.element_ty)
        right = tl.where(is_value, right, new_right * by_cos + new_left * by_sin).to(query.dtype.element_ty)
        is_query = (heads < HEADS)[:, None]
        tl.store(query + row * HEADS * WIDTH + offsets, left, inside & is_query)
        tl.store(query + row * HEADS * WIDTH + offsets + HALF, right, inside & is_query)
        # after all heads of the keys come those of the values
        offset = tl.load(words + _PAGE_OF_ROW + row) * LINE_NUMBERS + tl.load(words + _SLOT + row) * WIDTH
        to_page = base + layer_start + offset + (heads - HEADS)[:, None] * _PAGE * WIDTH + pairs[None, :]
        tl.store(to_page, left, inside & ~is_query)
        tl.store(to_page + HALF, right, inside & ~is_query)


def rotate_and_write(
    sums: Tensor,
    bias: Tensor | None,
    norms: Tensor | None,
    eps: float,
    tables: RotationTables,
    words: Tensor,
    query: Tensor,
    base: Tensor,
    layer_start: int,
    num_kv_heads: int,
) -> None:
    """Write rotated queries, and rotated keys and values where `words` says, for every row that is not dead.

    Args:
        sums: [splits, rows, (H + 2 H_kv) * D] float32: queries, keys, values of each row.
        bias: [(H + 2 H_kv) * D] float32. norms: [2, D] float32 weights of the norm over each query and key head.
        words: `step_arrays`, on the device.
        query: [rows, H, D] in the pages' type, written.
        base: the dummy page. layer_start: the first number of the layer in a page.
    """
    rows, heads, width = query.shape
    grid = (rows, triton.cdiv(heads + 2 * num_kv_heads, _BLOCK_HEADS.value))
    _rotate_and_write[grid](
        sums,
        sums if bias is None else bias,
        sums if norms is None else norms,
        tables.cos,
        tables.sin,
        words,
        query,
        base,
        rows,
        layer_start,
        eps,
        HEADS=heads,
        KV_HEADS=num_kv_heads,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width // 2),
        SPLITS=len(sums),
        HAS_BIAS=bias is not None,
        HAS_NORM=norms is not None,
        LINE_NUMBERS=LINE // base.element_size(),
        num_warps=4,
    )
