"""The product with a matrix of 8- or 4-bit codes in groups of 32 inputs, which have a scale in common.

Numbers are made of the codes in registers, and multiplied as those of a float matrix are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from forerun.kernels.quantised_weight import GROUP, QuantisedWeight
from forerun.kernels.triton.product_cut import Cut
from forerun.kernels.triton.step_arrays import TILE

_PAIR = 2 * GROUP
"""Inputs whose 4-bit codes share bytes: a low half from the first group, a high half from the second."""


@triton.jit
def _numbers(codes, scale, minimum, places, is_output, ZERO: tl.constexpr, HAS_MINIMUM: tl.constexpr):
    """What codes [BLOCK_N, groups, 32] stand for, with the scales and minima at `places`, [BLOCK_N, groups]."""
    numbers = (codes.to(tl.int32) - ZERO).to(tl.float32)
    numbers = numbers * tl.load(scale + places, is_output, 0.0).to(tl.float32)[:, :, None]
    if HAS_MINIMUM:
        numbers = numbers + tl.load(minimum + places, is_output, 0.0).to(tl.float32)[:, :, None]
    return numbers


@triton.jit
def _multiply_groups(
    x,
    codes,
    scale,
    minimum,
    sums,
    num_rows,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PART: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
):
    """Bytes come in runs of 32: a group of 8-bit codes each, or a pair of groups of 4-bit codes. BLOCK_G: runs of a
    block. GROUPS: of a row. PART: runs of a split."""
    PER_RUN: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = GROUPS // PER_RUN * 32
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    is_output = (outputs < OUTPUTS)[:, None]
    runs = tl.arange(0, BLOCK_G)
    lanes = tl.arange(0, BLOCK_G * 32)
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for step in range(0, PART, BLOCK_G):
        first = split * PART + step
        is_run = is_output & (first + runs < GROUPS // PER_RUN)[None, :]
        byte = first * 32 + lanes
        is_byte = is_output & (byte < BYTES)[None, :]
        packed = tl.load(codes + outputs[:, None].to(tl.int64) * BYTES + byte[None, :], is_byte, 0)
        packed = tl.reshape(packed, [BLOCK_N, BLOCK_G, 32])
        places = outputs[:, None].to(tl.int64) * GROUPS + (first + runs)[None, :] * PER_RUN
        inputs = byte // 32 * (32 * PER_RUN) + byte % 32
        taken = tl.load(x + rows[:, None] * INPUTS + inputs[None, :], (inputs < INPUTS)[None, :], 0.0)
        block = _numbers(packed if BITS == 8 else packed & 15, scale, minimum, places, is_run, ZERO, HAS_MINIMUM)
        block = tl.reshape(block, [BLOCK_N, BLOCK_G * 32]).to(taken.dtype)
        total = tl.dot(taken, tl.trans(block), total, input_precision="ieee")
        if BITS == 4:
            inputs += 32
            taken = tl.load(x + rows[:, None] * INPUTS + inputs[None, :], (inputs < INPUTS)[None, :], 0.0)
            block = _numbers(packed >> 4, scale, minimum, places + 1, is_run, ZERO, HAS_MINIMUM)
            block = tl.reshape(block, [BLOCK_N, BLOCK_G * 32]).to(taken.dtype)
            total = tl.dot(taken, tl.trans(block), total, input_precision="ieee")
    places = (split * num_rows + rows[:, None]).to(tl.int64) * OUTPUTS + outputs[None, :]
    tl.store(sums + places, total, (outputs < OUTPUTS)[None, :])


class GroupProduct:
    """`Product` with a matrix of 8- or 4-bit codes in groups of 32 inputs, each with a scale and perhaps a minimum.

    Args:
        weight: in groups. bias: [out] or None. takes: the type of x, in which the numbers are multiplied.
    """

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None, takes: torch.dtype) -> None:
        self.out_features, self.in_features = weight.shape
        self.takes = takes
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self._bits, self._zero = weight.bits, weight.zero
        wanted = GROUP if weight.bits == 8 else _PAIR
        padded = F.pad(weight.codes, (0, -self.in_features % wanted))
        self._codes = padded.contiguous() if weight.bits == 8 else _in_pairs(padded)
        self._groups = padded.shape[1] // GROUP
        self._scale = F.pad(weight.scale, (0, self._groups - weight.scale.shape[1])).contiguous()
        self._minimum = None
        if weight.minimum is not None:
            self._minimum = F.pad(weight.minimum, (0, self._groups - weight.scale.shape[1])).contiguous()
        self.splits = Cut.of(self.out_features, self.in_features, 1).splits

    def sums(self, x: Tensor, out: Tensor) -> None:
        """As `Product.sums`."""
        rows, runs = len(x), self._codes.shape[1] // GROUP
        block_n = 32 if self.out_features >= 32 else 16
        block_g = min(4, triton.next_power_of_2(runs))
        part = triton.cdiv(triton.cdiv(runs, self.splits), block_g) * block_g
        _multiply_groups[(rows // TILE, triton.cdiv(self.out_features, block_n), self.splits)](
            x,
            self._codes,
            self._scale,
            self._scale if self._minimum is None else self._minimum,
            out,
            rows,
            OUTPUTS=self.out_features,
            INPUTS=self.in_features,
            GROUPS=self._groups,
            ROWS=TILE,
            BLOCK_N=block_n,
            BLOCK_G=block_g,
            PART=part,
            BITS=self._bits,
            ZERO=self._zero,
            HAS_MINIMUM=self._minimum is not None,
            num_warps=4,
            num_stages=3,
        )

    def rows(self, index: Tensor) -> Tensor:
        """As `Product.rows`."""
        codes, minimum = self._codes[index], None if self._minimum is None else self._minimum[index]
        codes = codes if self._bits == 8 else _out_of_pairs(codes)
        weight = QuantisedWeight(self._bits, codes, self._zero, self._scale[index], minimum, GROUP)
        return weight.dequantise(torch.float32)[:, : self.in_features]

    def float_numbers(self) -> None:
        """As `Product.float_numbers`."""
        return


def _in_pairs(codes: Tensor) -> Tensor:
    """4-bit codes [out, in], a byte each -> [out, in / 2]: of each pair of groups, the first in the low halves."""
    first, second = codes.view(len(codes), -1, 2, GROUP).unbind(2)
    return (first | second << 4).reshape(len(codes), -1).contiguous()


def _out_of_pairs(packed: Tensor) -> Tensor:
    """What `_in_pairs` was given."""
    runs = packed.view(len(packed), -1, 1, GROUP)
    return torch.cat([runs & 15, runs >> 4], 2).reshape(len(packed), -1)
