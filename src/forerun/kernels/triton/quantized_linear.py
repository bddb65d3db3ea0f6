"""The Triton products with quantized matrices: in groups of 32 inputs, and with one scale per output.

Integers are multiplied by integers: activations have 16 bits, as on the CPU, in two halves of 8 bits, which tensor
cores multiply. Sums of integers have no order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from forerun.kernels.quantize import GROUP, QuantizedWeight, activation_limit
from forerun.kernels.triton.linear import Product
from forerun.kernels.triton.product_cut import Cut
from forerun.kernels.triton.step_arrays import MAX_ROWS, TILE

# The product with a matrix of 8- or 4-bit values in groups of 32 inputs, which share a scale: values are dequantized in
# registers, and multiplied like those of a float matrix.

_PAIR = 2 * GROUP
"""Inputs whose 4-bit values share bytes: a low half from the first group, a high half from the second."""


@triton.jit
def _numbers(quantized, scale, minimum, offsets, is_output, ZERO: tl.constexpr, HAS_MINIMUM: tl.constexpr):
    """Dequantize values [BLOCK_N, groups, 32] with the scales and minima at `offsets`, [BLOCK_N, groups]."""
    numbers = (quantized.to(tl.int32) - ZERO).to(tl.float32)
    numbers = numbers * tl.load(scale + offsets, is_output, 0.0).to(tl.float32)[:, :, None]
    if HAS_MINIMUM:
        numbers = numbers + tl.load(minimum + offsets, is_output, 0.0).to(tl.float32)[:, :, None]
    return numbers


@triton.jit
def _multiply_groups(
    x,
    quantized,
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
    """Multiply by a matrix whose bytes come in runs of 32: a group of 8-bit values each, or a pair of groups of 4-bit
    values. BLOCK_G: runs of a block. GROUPS: of a row. PART: runs of a split."""
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
        packed = tl.load(quantized + outputs[:, None].to(tl.int64) * BYTES + byte[None, :], is_byte, 0)
        packed = tl.reshape(packed, [BLOCK_N, BLOCK_G, 32])
        offsets = outputs[:, None].to(tl.int64) * GROUPS + (first + runs)[None, :] * PER_RUN
        inputs = byte // 32 * (32 * PER_RUN) + byte % 32
        taken = tl.load(x + rows[:, None] * INPUTS + inputs[None, :], (inputs < INPUTS)[None, :], 0.0)
        block = _numbers(packed if BITS == 8 else packed & 15, scale, minimum, offsets, is_run, ZERO, HAS_MINIMUM)
        block = tl.reshape(block, [BLOCK_N, BLOCK_G * 32]).to(taken.dtype)
        total = tl.dot(taken, tl.trans(block), total, input_precision="ieee")
        if BITS == 4:
            inputs += 32
            taken = tl.load(x + rows[:, None] * INPUTS + inputs[None, :], (inputs < INPUTS)[None, :], 0.0)
            block = _numbers(packed >> 4, scale, minimum, offsets + 1, is_run, ZERO, HAS_MINIMUM)
            block = tl.reshape(block, [BLOCK_N, BLOCK_G * 32]).to(taken.dtype)
            total = tl.dot(taken, tl.trans(block), total, input_precision="ieee")
    offsets = (split * num_rows + rows[:, None]).to(tl.int64) * OUTPUTS + outputs[None, :]
    tl.store(sums + offsets, total, (outputs < OUTPUTS)[None, :])


class GroupProduct:
    """`Product` with a matrix of 8- or 4-bit values in groups of 32 inputs, each with a scale and perhaps a minimum.

    Args:
        weight: in groups. bias: [out] or None. takes: the type of x, in which the numbers are multiplied.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, takes: torch.dtype) -> None:
        self.out_features, self.in_features = weight.shape
        self.takes = takes
        self.bias = None if bias is None else bias.detach().float().contiguous()
        assert isinstance(weight.zero, int)  # zeros of groups are computed by the native kernels
        self._bits = weight.bits
        self._zero = weight.zero
        wanted = GROUP if weight.bits == 8 else _PAIR
        padded = F.pad(weight.quantized, (0, -self.in_features % wanted))
        self._quantized = padded.contiguous() if weight.bits == 8 else _in_pairs(padded)
        self._groups = padded.shape[1] // GROUP
        missing = (0, self._groups - weight.scale.shape[1])
        self._scale = F.pad(weight.scale, missing).contiguous()
        self._minimum = None if weight.minimum is None else F.pad(weight.minimum, missing).contiguous()
        self.splits = Cut.of(self.out_features, self.in_features, 1).splits

    def sums(self, x: Tensor, out: Tensor) -> None:
        """Write the sums of each split (`Product.sums`)."""
        rows = len(x)
        runs = self._quantized.shape[1] // GROUP
        block_n = 32 if self.out_features >= 32 else 16
        block_g = min(4, triton.next_power_of_2(runs))
        part = triton.cdiv(triton.cdiv(runs, self.splits), block_g) * block_g
        _multiply_groups[(rows // TILE, triton.cdiv(self.out_features, block_n), self.splits)](
            x,
            self._quantized,
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
        """Return rows of the weight (`Product.rows`)."""
        quantized = self._quantized[index]
        minimum = None if self._minimum is None else self._minimum[index]
        quantized = quantized if self._bits == 8 else _out_of_pairs(quantized)
        weight = QuantizedWeight(self._bits, quantized, self._zero, self._scale[index], minimum, GROUP)
        return weight.dequantize(torch.float32)[:, : self.in_features]

    def float_numbers(self) -> None:
        """Return None: quantized values are finite (`Product.float_numbers`)."""


def _in_pairs(quantized: Tensor) -> Tensor:
    """Pack 4-bit values [out, in], a byte each, to [out, in / 2]: of each pair of groups, the first in the low
    halves."""
    first, second = quantized.view(len(quantized), -1, 2, GROUP).unbind(2)
    return (first | second << 4).reshape(len(quantized), -1).contiguous()


def _out_of_pairs(packed: Tensor) -> Tensor:
    """Undo `_in_pairs`."""
    runs = packed.view(len(packed), -1, 1, GROUP)
    return torch.cat([runs & 15, runs >> 4], 2).reshape(len(packed), -1)


_LARGEST = 127 * 256 + 127
"""Code of an activation whose two halves fit into 8 bits each."""
_ENOUGH = 256
"""Programs that keep the memory of a large device busy."""
AS_WRITTEN = {"enable_fp_fusion": False}
"""Option of the compiler: products are rounded before they are added to, as on a CPU. Fused, x * inverse + 1.5 * 2^23
is rounded once, and values half-way between two integers differ from the reference's."""


@triton.jit
def _quantize_rows(x, high, low, scale, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
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
    quantized = (shifted - 12582912.0).to(tl.int32)
    upper = (quantized + 128) >> 8
    tl.store(high + row * WIDTH + columns, upper.to(tl.int8), inside)
    tl.store(low + row * WIDTH + columns, (quantized - upper * 256).to(tl.int8), inside)
    bad = tl.max(tl.where(is_sound, 0, 1))
    tl.store(scale + row, tl.where(bad > 0, float("nan"), tl.div_rn(largest, limit)))


@triton.jit
def _multiply_quantized(
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
        offsets = rows[:, None] * INPUTS + inputs[None, :]
        upper = tl.dot(tl.load(high + offsets, is_input[None, :], 0), block, upper, out_dtype=tl.int32)
        lower = tl.dot(tl.load(low + offsets, is_input[None, :], 0), block, lower, out_dtype=tl.int32)
        inputs += BLOCK_K
    total = (upper * 256 + lower).to(tl.float32)
    scales = tl.load(scale + rows)[:, None] * tl.load(weight_scale + outputs, is_output, 0.0)[None, :]
    tl.store(sums + rows[:, None].to(tl.int64) * OUTPUTS + outputs[None, :], total * scales, is_output[None, :])


class ActivationBuffers:
    """Memory for quantized activations, shared by all products of one model, which are computed one after another.

    Args:
        device: where they lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_width: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def of_width(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the high and low halves of quantized values, [MAX_ROWS, width] int8, and scales, [MAX_ROWS]
        float32."""
        if width not in self._by_width:
            high, low = (torch.zeros(MAX_ROWS, width, dtype=torch.int8, device=self._device) for _ in range(2))
            self._by_width[width] = high, low, torch.zeros(MAX_ROWS, device=self._device)
        return self._by_width[width]


class ChannelProduct:
    """`Product` with a matrix of 8-bit values, one scale per output: exact integer sums, scaled once.

    Args:
        weight: with one scale per output. bias: [out] or None. takes: the type of x.
        activation_buffers: of the model.
    """

    def __init__(
        self, weight: QuantizedWeight, bias: Tensor | None, takes: torch.dtype, activation_buffers: ActivationBuffers
    ) -> None:
        self.splits = 1
        self.out_features, self.in_features = weight.shape
        self.takes = takes
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self._quantized = (weight.quantized.to(torch.int16) - weight.zero).to(torch.int8).contiguous()
        self._scale = weight.scale[:, 0].float().contiguous()
        self._limit = channel_limit(weight)
        self._block_n = 64
        while self._block_n > 16 and triton.cdiv(self.out_features, self._block_n) < _ENOUGH:
            self._block_n //= 2
        self._activation_buffers = activation_buffers.of_width(self.in_features)

    def sums(self, x: Tensor, out: Tensor) -> None:
        """Write the sums of each split (`Product.sums`)."""
        rows, width = x.shape
        high, low, scale = self._activation_buffers
        block = triton.next_power_of_2(width)
        _quantize_rows[(rows,)](
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
        _multiply_quantized[(rows // TILE, triton.cdiv(self.out_features, self._block_n))](
            high,
            low,
            scale,
            self._quantized,
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
        """Return rows of the weight (`Product.rows`)."""
        return self._quantized[index].float() * self._scale[index, None]

    def float_numbers(self) -> None:
        """Return None: quantized values are finite (`Product.float_numbers`)."""


def quantized_product(
    weight: QuantizedWeight, bias: Tensor | None, takes: torch.dtype, activation_buffers: ActivationBuffers
) -> Product:
    """Return the product with a quantized matrix of any format. activation_buffers: of the model."""
    if weight.group is None:
        return ChannelProduct(weight, bias, takes, activation_buffers)
    return GroupProduct(weight, bias, takes)


def channel_limit(weight: QuantizedWeight) -> int:
    """Return the largest quantized activation that such a matrix is multiplied with."""
    return min(_LARGEST, activation_limit(weight))
