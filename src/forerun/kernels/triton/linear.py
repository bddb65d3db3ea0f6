"""The Triton product with a float matrix, cut so that a row's bits do not depend on the number of rows.

What is added up in which order follows the shape of the matrix alone: BLOCK_K inputs at a time, split by split, and the
sums of splits are added in order by whoever reads them. Rows are multiplied TILE at a time, however many there are, by
one and the same operation: for wider tiles the compiler takes other instructions of the tensor cores, whose order of
additions nobody promises to be the same. Up to four tiles share a block of the matrix that was read once.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.triton.product_cut import Cut
from forerun.kernels.triton.step_arrays import MAX_ROWS, TILE, bucket_of

_MOST_TILES = 4
"""Tiles of rows that share a block of the matrix: one, two or four."""


@triton.jit
def _tile(x, tile, inputs, is_input, ROWS: tl.constexpr, INPUTS: tl.constexpr):
    """Load ROWS rows of x, [ROWS, BLOCK_K]."""
    rows = tile * ROWS + tl.arange(0, ROWS)
    return tl.load(x + rows[:, None] * INPUTS + inputs[None, :], is_input[None, :], 0.0)


@triton.jit
def _store(sums, total, tile, split, num_rows, outputs, ROWS: tl.constexpr, OUTPUTS: tl.constexpr):
    rows = split * num_rows + tile * ROWS + tl.arange(0, ROWS)
    offsets = rows[:, None].to(tl.int64) * OUTPUTS + outputs[None, :]
    tl.store(sums + offsets, total, (outputs < OUTPUTS)[None, :])


@triton.jit
def _product(
    x,
    weight,
    sums,
    num_rows,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART: tl.constexpr,
):
    tile = tl.program_id(0) * TILES  # programs that read the same weights run side by side
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    inputs = split * PART + tl.arange(0, BLOCK_K)
    weight_start = weight + outputs[:, None].to(tl.int64) * INPUTS
    is_output = (outputs < OUTPUTS)[:, None]
    first = tl.zeros([ROWS, BLOCK_N], tl.float32)
    second = first
    third = first
    fourth = first
    for _ in range(0, PART, BLOCK_K):
        is_input = inputs < INPUTS
        block = tl.load(weight_start + inputs[None, :], is_output & is_input[None, :], 0.0)
        block = tl.trans(block)
        taken = _tile(x, tile, inputs, is_input, ROWS, INPUTS)
        first = tl.dot(taken, block, first, input_precision="ieee")
        if TILES > 1:
            taken = _tile(x, tile + 1, inputs, is_input, ROWS, INPUTS)
            second = tl.dot(taken, block, second, input_precision="ieee")
        if TILES > 2:
            taken = _tile(x, tile + 2, inputs, is_input, ROWS, INPUTS)
            third = tl.dot(taken, block, third, input_precision="ieee")
            taken = _tile(x, tile + 3, inputs, is_input, ROWS, INPUTS)
            fourth = tl.dot(taken, block, fourth, input_precision="ieee")
        inputs += BLOCK_K
    _store(sums, first, tile, split, num_rows, outputs, ROWS, OUTPUTS)
    if TILES > 1:
        _store(sums, second, tile + 1, split, num_rows, outputs, ROWS, OUTPUTS)
    if TILES > 2:
        _store(sums, third, tile + 2, split, num_rows, outputs, ROWS, OUTPUTS)
        _store(sums, fourth, tile + 3, split, num_rows, outputs, ROWS, OUTPUTS)


@triton.jit
def _add_splits(
    sums,
    bias,
    out,
    num_rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.load(sums + row.to(tl.int64) * WIDTH + columns, inside, 0.0)
    for split in range(1, SPLITS):
        total += tl.load(sums + (split * num_rows + row).to(tl.int64) * WIDTH + columns, inside, 0.0)
    if HAS_BIAS:
        total += tl.load(bias + columns, inside, 0.0)
    tl.store(out + row.to(tl.int64) * WIDTH + columns, total, inside)


class Product(Protocol):
    """x W^T in float32, as sums of splits.

    Attributes:
        in_features, out_features: widths of x and of the result.
        bias: [out] float32, which whoever adds the splits adds after them; None without one.
        splits: parts that the inputs are cut into.
        takes: the type of x.
    """

    in_features: int
    out_features: int
    bias: Tensor | None
    splits: int
    takes: torch.dtype

    def sums(self, x: Tensor, out: Tensor) -> None:
        """Write the sums of each split.

        Args:
            x: [rows, in] in `takes`; as many rows as a bucket has. out: [splits, rows, out] float32.
        """

    def rows(self, index: Tensor) -> Tensor:
        """Return rows of the weight. index: [n] int64 -> [n, in] float32."""

    def float_numbers(self) -> Tensor | None:
        """Return the weight, [out, in], if it is floats; None if it is quantized, and thus finite."""


class FloatProduct:
    """`Product` with a matrix of floats.

    Args:
        weight: [out, in], contiguous. bias: [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight.detach().contiguous()
        self.takes = weight.dtype
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self._cut = Cut.of(self.out_features, self.in_features, weight.element_size())
        self.splits = self._cut.splits
        steps = triton.cdiv(triton.cdiv(self.in_features, self.splits), self._cut.block_k)
        self._part = steps * self._cut.block_k

    def sums(self, x: Tensor, out: Tensor) -> None:
        """Write the sums of each split (`Product.sums`)."""
        rows = len(x)
        cut = self._cut
        tiles = min(_MOST_TILES, rows // TILE)
        grid = (rows // (tiles * TILE), triton.cdiv(self.out_features, cut.block_n), self.splits)
        _product[grid](
            x,
            self.weight,
            out,
            rows,
            OUTPUTS=self.out_features,
            INPUTS=self.in_features,
            ROWS=TILE,
            TILES=tiles,
            BLOCK_N=cut.block_n,
            BLOCK_K=cut.block_k,
            PART=self._part,
            num_warps=4,
            num_stages=4,
        )

    def rows(self, index: Tensor) -> Tensor:
        """Return rows of the weight (`Product.rows`)."""
        return self.weight[index].float()

    def float_numbers(self) -> Tensor:
        """Return the weight, [out, in] (`Product.float_numbers`)."""
        return self.weight


def add_splits(sums: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write the splits, added in order, plus the bias, to `out`.

    Args:
        sums: [splits, rows, width] float32. out: [rows, width] float32.
    """
    rows, width = out.shape
    block = min(1024, triton.next_power_of_2(width))
    _add_splits[(rows, triton.cdiv(width, block))](
        sums,
        out if bias is None else bias,
        out,
        rows,
        WIDTH=width,
        BLOCK=block,
        SPLITS=len(sums),
        HAS_BIAS=bias is not None,
    )


def multiply(product: Product, x: Tensor) -> Tensor:
    """Return x W^T + b for any number of rows, in parts of MAX_ROWS padded to a bucket. x: [n, in] -> [n, out]
    float32."""
    count = len(x)
    if count > MAX_ROWS:
        return torch.cat([multiply(product, part) for part in x.split(MAX_ROWS)])
    padded = x.new_zeros(bucket_of(count), product.in_features)
    padded[:count] = x
    sums = torch.empty(product.splits, len(padded), product.out_features, dtype=torch.float32, device=x.device)
    product.sums(padded, sums)
    out = torch.empty_like(sums[0])
    add_splits(sums, product.bias, out)
    return out[:count]
