"""Quantization of weights to 8 and 4 bits, and of activations to 16 and 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.errors import ModelLoadError

GROUP = 32
"""Inputs that have a scale in common, as in GGUF's Q8_0, Q4_0 and Q4_1."""
_PART = 1 << 22
"""Numbers dequantized together: what is needed beside the result."""


class QuantizedFormat(NamedTuple):
    """The properties that weights must share to be joined: see the attributes of `QuantizedWeight`.

    Attributes:
        zero: None: each group has its own.
        has_minimum: whether there are minima.
    """

    bits: int
    zero: int | None
    group: int | None
    has_minimum: bool


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A matrix stored as quantized values, which stand for scale * (quantized - zero) + minimum by group of inputs.

    Attributes:
        bits: 8 or 4; of GGUF's blocks also 5 or 6.
        quantized: [out, in] uint8, a byte per value.
        zero: the value that stands for 0, or for the minimum: 128 for 8 bits, 8 or 0 for 4. Or [out, groups] uint8, one
            of each group, without minima.
        scale: [out, groups], float16 or, of GGUF's blocks and of weights with zeros, float32; the last group may be
            shorter. [out, 1] float32 for one scale per output channel. All are finite.
        minimum: like the scales of groups, if zero is 0; else None.
        group: GROUP, of GGUF's blocks also 16, of weights with zeros a multiple of GROUP, or None: the whole row.
        activation_bits: of the activations that it is multiplied with: 16, one scale per row; or 8, one per group.
    """

    bits: int
    quantized: Tensor
    zero: int | Tensor
    scale: Tensor
    minimum: Tensor | None
    group: int | None
    activation_bits: int = 16

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of outputs and inputs."""
        return self.quantized.shape[0], self.quantized.shape[1]

    @property
    def device(self) -> torch.device:
        """Return where the quantized values lie."""
        return self.quantized.device

    @property
    def form(self) -> QuantizedFormat:
        """Return the properties that weights must share to be joined."""
        zero = self.zero if isinstance(self.zero, int) else None
        return QuantizedFormat(self.bits, zero, self.group, self.minimum is not None)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return [out, in] numbers, computed in float32 and converted to `dtype`."""
        result = torch.empty(self.shape, dtype=dtype, device=self.quantized.device)
        count = max(1, _PART // self.shape[1])
        for first in range(0, self.shape[0], count):
            rows = slice(first, first + count)
            zero = self.zero if isinstance(self.zero, int) else self._wide(self.zero[rows])
            numbers = (self.quantized[rows].float() - zero).mul_(self._wide(self.scale[rows]))
            result[rows] = numbers if self.minimum is None else numbers.add_(self._wide(self.minimum[rows]))
        return result

    def centred(self) -> Tensor:
        """Return [out, in] quantized values minus their zeros, float64."""
        return self.quantized.double() - (self.zero if isinstance(self.zero, int) else self._wide(self.zero))

    def rows(self, index: Tensor) -> QuantizedWeight:
        """Select or reorder output channels. index: [n] int64."""
        return self._each(lambda tensor: tensor[index])

    def to(self, device: torch.device) -> QuantizedWeight:
        """Copy the weight to another device."""
        return self._each(lambda tensor: tensor.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        """Return the weight with its tensors changed."""
        zero = change(self.zero) if isinstance(self.zero, Tensor) else self.zero
        minimum = None if self.minimum is None else change(self.minimum)
        return replace(self, quantized=change(self.quantized), zero=zero, scale=change(self.scale), minimum=minimum)

    @staticmethod
    def cat(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Concatenate the output channels of several weights.

        Raises:
            ValueError: they differ in form or in the number of inputs.
        """
        first = parts[0]
        if len(parts) == 1:
            return first
        if any((part.form, part.shape[1]) != (first.form, first.shape[1]) for part in parts):
            forms = ", ".join(f"{part.form} of {part.shape[1]} inputs" for part in parts)
            raise ValueError(f"weights of different forms cannot be one: {forms}")
        minima = [part.minimum for part in parts if part.minimum is not None]
        zeros = [part.zero for part in parts if isinstance(part.zero, Tensor)]
        return replace(
            first,
            quantized=torch.cat([part.quantized for part in parts]),
            zero=torch.cat(zeros) if zeros else first.zero,
            scale=torch.cat([part.scale for part in parts]),
            minimum=torch.cat(minima) if minima else None,
        )

    def _wide(self, by_group: Tensor) -> Tensor:
        """Expand [rows, groups] to [rows, in] or [rows, 1], float32."""
        wide = by_group.float()
        return wide if self.group is None else wide.repeat_interleave(self.group, 1)[:, : self.shape[1]]


LARGEST = 127
"""Values of 8 bits are -127..127 about their zero."""
_LEVELS = 15
"""The largest value of 4 bits."""
_MOST_INPUTS = 1 << 17
"""Inputs whose integer products, 127 * 127 each, still fit into an int32 sum."""
MADE_FORMS = {8: QuantizedFormat(8, 128, None, False), 4: QuantizedFormat(4, 0, GROUP, True)}
"""By bits, the format of the weights that are quantized here."""


def activation_limit(weight: QuantizedWeight) -> int:
    """Return the largest quantized activation that a weight is multiplied with: 16 bits, and without groups the largest
    value whose products with 8-bit values, 128 in magnitude, sum within 32 bits over all inputs. The sums of groups
    always fit."""
    return 32767 if weight.group is not None else min(32767, (2**31 - 1) // (128 * max(1, weight.shape[1])))


def quantize_symmetric(x: Tensor, limit: int = LARGEST) -> tuple[Tensor, Tensor]:
    """Quantize to -limit..limit with one scale per row: scale = amax / limit, quantized = round-half-even(x * (limit /
    amax)).

    Values are 0 where amax is 0, or so small that limit / amax overflows. A row with NaN or infinity has the scale NaN
    and values 0.

    Args:
        x: [..., n] float32.

    Returns:
        [..., n] whole numbers in float32; [..., 1] float32 scales.
    """
    amax = x.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(amax, limit) / amax  # a number over a tensor is its reciprocal times the number
    finite = torch.isfinite(amax)
    quantized = torch.where(finite & torch.isfinite(inverse), (x * inverse).round_(), 0.0)
    return quantized, torch.where(finite, amax / limit, torch.nan)


def quantize_int8(weight: Tensor, name: str = "a weight") -> QuantizedWeight:
    """Quantize to 8 bits with one scale per output channel; quantized values are 1..255.

    Args:
        weight: [out, in] float. name: of the tensor, for messages.

    Raises:
        ModelLoadError: it holds NaN or infinity, or has more inputs than an int32 sum can hold.
    """
    if weight.shape[1] > _MOST_INPUTS:
        raise ModelLoadError(
            f"{name} has {weight.shape[1]:,} inputs, and at 8 bits at most {_MOST_INPUTS:,} can be added exactly. "
            "Load the model without quantize."
        )
    return _by_rows(weight, name, _int8)


def quantize_int4(weight: Tensor, name: str = "a weight") -> QuantizedWeight:
    """Quantize to 4 bits in groups of 32 inputs with scale and minimum, as GGUF's Q4_1. The quantized values are
    computed with the scale and minimum as stored, rounded to float16.

    Args:
        weight: [out, in] float. name: of the tensor, for messages.

    Raises:
        ModelLoadError: it holds NaN or infinity, or numbers beyond float16.
    """
    return _by_rows(weight, name, _int4)


def _by_rows(weight: Tensor, name: str, quantize: Callable[[Tensor], QuantizedWeight]) -> QuantizedWeight:
    """Quantize some rows at a time."""
    parts = []
    for rows in torch.split(weight.detach(), max(1, _PART // max(1, weight.shape[1]))):
        if not bool(torch.isfinite(rows).all()):
            raise ModelLoadError(
                f"{name} holds NaN or infinity, which cannot be quantized. Download or save the model anew."
            )
        part = quantize(rows.float())
        if not bool(torch.isfinite(part.scale).all()) or not (part.minimum is None or part.minimum.isfinite().all()):
            raise ModelLoadError(
                f"{name} holds numbers beyond float16's range, in which the scales of 4 bits are kept. Quantize it at "
                "8 bits: quantize='int8'."
            )
        parts.append(part)
    return QuantizedWeight.cat(parts)


def _int8(weight: Tensor) -> QuantizedWeight:
    quantized, scale = quantize_symmetric(weight)
    return QuantizedWeight(8, (quantized + 128).to(torch.uint8), 128, scale, None, None)


def _int4(weight: Tensor) -> QuantizedWeight:
    num_inputs = weight.shape[1]
    short = -num_inputs % GROUP
    # the last number again, so that it changes neither the least nor the largest of its group
    padded = F.pad(weight[None], (0, short), "replicate")[0] if short else weight
    groups = padded.view(len(weight), -1, GROUP)
    least = groups.amin(-1, keepdim=True)
    most = groups.amax(-1, keepdim=True)
    minimum = least.half()
    scale = ((most - minimum.float()) / _LEVELS).half()
    step = scale.float()
    quantized = ((groups - minimum.float()) / step).round_()
    quantized = torch.where(step > 0, quantized, 0.0).clamp_(0, _LEVELS).to(torch.uint8)
    quantized = quantized.view(len(weight), -1)[:, :num_inputs].contiguous()
    return QuantizedWeight(4, quantized, 0, scale[..., 0], minimum[..., 0], GROUP)
