"""The product with a matrix of 8-bit codes with one scale per output, and the choice between it and that of groups.

Codes are multiplied by codes: activations have 16 bits, as on the CPU, in two halves of 8 which tensor cores multiply.
Sums of whole numbers have no order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.quantise import largest_row_code
from forerun.kernels.quantised_weight import QuantisedWeight
from forerun.kernels.triton.grouped_linear import GroupProduct
from forerun.kernels.triton.linear import Product
from forerun.kernels.triton.step_arrays import MAX_ROWS, TILE

_LARGEST = 127 * 256 + 127
"""Code of an activation whose two halves fit into 8 bits each."""
_ENOUGH = 256
"""Programs that keep the memory of a large device busy."""
AS_WRITTEN = {"enable_fp_fusion": False}
"""Option of the compiler: products are rounded before they are added to, as on a CPU. Fused, x * inverse + 1.5 * 2^23
is rounded once, and codes that come to lie half-way between two differ from the reference's."""


@triton.jit
def _quantise_rows(x, high, low, scale, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    numbers = tl.load(x + row * WIDTH + columns, inside, 0.0).to(tl.float32)
    is_sound = tl.abs(numbers) < float("inf")
    numbers = tl.where(is_sound, numbers, 0.0)
    largest = tl.max(tl.abs(numbers))
    inverse = tl.div_rn(limit, tl.where(largest > 0, largest, 1.0))
    inverse = tl.where((largest > 0) & (inverse < float("inf")), inverse, 0.0)
    shifted = numbers * inverse + 12582912.0  # 1.5 * 2^23: what is below the last whole digit is rounded away, to even
    codes = (shifted - 12582912.0).to(tl.int32)
    upper = (codes + 128) >> 8
    tl.store(high + row * WIDTH + columns, upper.to(tl.int8), inside)
    tl.store(low + row * WIDTH + columns, (codes - upper * 256).to(tl.int8), inside)
    bad = tl.max(tl.where(is_sound, 0, 1))
    tl.store(scale + row, tl.where(bad > 0, float("nan"), tl.div_rn(largest, limit)))


@triton.jit
def _multiply_codes(
    high,
    low,
    scale,
    weight,
    weight_scale,
    sums,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs = tl.arange(0, BLOCK_K)
    is_output = outputs < OUTPUTS
    weight_start = weight + outputs[:, None].to(tl.int64) * INPUTS
    upper = tl.zeros([ROWS, BLOCK_N], tl.int32)
    lower = tl.zeros([ROWS, BLOCK_N], tl.int32)
    for _ in range(0, INPUTS, BLOCK_K):
        is_input = inputs < INPUTS
        block = tl.load(weight_start + inputs[None, :], is_output[:, None] & is_input[None, :], 0)
        block = tl.trans(block)
        places = rows[:, None] * INPUTS + inputs[None, :]
        upper = tl.dot(tl.load(high + places, is_input[None, :], 0), block, upper, out_dtype=tl.int32)
        lower = tl.dot(tl.load(low + places, is_input[None, :], 0), block, lower, out_dtype=tl.int32)
        inputs += BLOCK_K
    total = (upper * 256 + lower).to(tl.float32)
    scales = tl.load(scale + rows)[:, None] * tl.load(weight_scale + outputs, is_output, 0.0)[None, :]
    tl.store(sums + rows[:, None].to(tl.int64) * OUTPUTS + outputs[None, :], total * scales, is_output[None, :])


class RowCodes:
    """Memory for the codes of activations, shared by all products of one model, which are computed one after another.

    Args:
        device: where they lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_width: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def of_width(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Halves of codes, high and low, [MAX_ROWS, width] int8, and scales, [MAX_ROWS] float32."""
        if width not in self._by_width:
            high, low = (torch.zeros(MAX_ROWS, width, dtype=torch.int8, device=self._device) for _ in range(2))
            self._by_width[width] = high, low, torch.zeros(MAX_ROWS, device=self._device)
        return self._by_width[width]


class ChannelProduct:
    """`Product` with a matrix of 8-bit codes, one scale per output: exact sums of whole numbers, scaled once.

    Args:
        weight: with one scale per output. bias: [out] or None. takes: the type of x.
        row_codes: of the model.
    """

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None, takes: torch.dtype, row_codes: RowCodes) -> None:
        self.splits = 1
        self.out_features, self.in_features = weight.shape
        self.takes = takes
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self._codes = (weight.codes.to(torch.int16) - weight.zero).to(torch.int8).contiguous()
        self._scale = weight.scale[:, 0].float().contiguous()
        self._limit = channel_limit(weight)
        self._block_n = 64
        while self._block_n > 16 and triton.cdiv(self.out_features, self._block_n) < _ENOUGH:
            self._block_n //= 2
        self._row_codes = row_codes.of_width(self.in_features)

    def sums(self, x: Tensor, out: Tensor) -> None:
        """As `Product.sums`."""
        rows, width = x.shape
        high, low, scale = self._row_codes
        block = triton.next_power_of_2(width)
        _quantise_rows[(rows,)](
            x,
            high,
            low,
            scale,
            float(self._limit),
            WIDTH=width,
            BLOCK=block,
            num_warps=4 if block <= 4096 else 8,
            **AS_WRITTEN,
        )
        _multiply_codes[(rows // TILE, triton.cdiv(self.out_features, self._block_n))](
            high,
            low,
            scale,
            self._codes,
            self._scale,
            out,
            OUTPUTS=self.out_features,
            INPUTS=width,
            ROWS=TILE,
            BLOCK_N=self._block_n,
            BLOCK_K=min(256, max(32, triton.next_power_of_2(width))),
            num_warps=4,
            num_stages=4,
        )

    def rows(self, index: Tensor) -> Tensor:
        """As `Product.rows`."""
        return self._codes[index].float() * self._scale[index, None]

    def float_numbers(self) -> None:
        """As `Product.float_numbers`."""
        return


def code_product(weight: QuantisedWeight, bias: Tensor | None, takes: torch.dtype, row_codes: RowCodes) -> Product:
    """The product with a matrix in codes of any form. row_codes: of the model."""
    if weight.group is None:
        return ChannelProduct(weight, bias, takes, row_codes)
    return GroupProduct(weight, bias, takes)


def channel_limit(weight: QuantisedWeight) -> int:
    """The largest code of an activation that such a matrix is multiplied with."""
    return min(_LARGEST, largest_row_code(weight))
