"""A matrix of weights in codes of 8 or 4 bits: scale * (code - zero) + minimum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32
"""Inputs that have a scale in common, as in GGUF's Q8_0, Q4_0 and Q4_1."""
_PART = 1 << 22
"""Numbers dequantised together: what is needed beside the result."""


class CodeForm(NamedTuple):
    """What weights must have in common to be one: see the attributes of `QuantisedWeight`.

    Attributes:
        has_minimum: whether there are minima.
    """

    bits: int
    zero: int
    group: int | None
    has_minimum: bool


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedWeight:
    """Numbers are scale * (code - zero) + minimum, by group of inputs.

    Attributes:
        bits: 8 or 4.
        codes: [out, in] uint8, a byte a number.
        zero: the code that stands for 0, or for the minimum: 128 for 8 bits, 8 or 0 for 4.
        scale: [out, groups] float16 for groups of 32 inputs, the last of which may be shorter; [out, 1] float32 for one
            scale per output channel. All are finite.
        minimum: [out, groups] float16, of codes whose zero is 0; else None.
        group: GROUP, or None: the whole row.
    """

    bits: int
    codes: Tensor
    zero: int
    scale: Tensor
    minimum: Tensor | None
    group: int | None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def form(self) -> CodeForm:
        """What weights must have in common to be one."""
        return CodeForm(self.bits, self.zero, self.group, self.minimum is not None)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """[out, in]. The numbers are computed in float32 and then brought to `dtype`."""
        result = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        count = max(1, _PART // self.shape[1])
        for first in range(0, self.shape[0], count):
            rows = slice(first, first + count)
            numbers = (self.codes[rows].to(torch.int16) - self.zero).float().mul_(self._wide(self.scale[rows]))
            result[rows] = numbers if self.minimum is None else numbers.add_(self._wide(self.minimum[rows]))
        return result

    def rows(self, index: Tensor) -> QuantisedWeight:
        """Output channels picked or reordered. index: [n] int64."""
        minimum = None if self.minimum is None else self.minimum[index]
        return replace(self, codes=self.codes[index], scale=self.scale[index], minimum=minimum)

    def to(self, device: torch.device) -> QuantisedWeight:
        """The same on another device."""
        minimum = None if self.minimum is None else self.minimum.to(device)
        return replace(self, codes=self.codes.to(device), scale=self.scale.to(device), minimum=minimum)

    @staticmethod
    def cat(parts: Sequence[QuantisedWeight]) -> QuantisedWeight:
        """The output channels of several weights one after another.

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
        return replace(
            first,
            codes=torch.cat([part.codes for part in parts]),
            scale=torch.cat([part.scale for part in parts]),
            minimum=torch.cat(minima) if minima else None,
        )

    def _wide(self, by_group: Tensor) -> Tensor:
        """[rows, groups] -> [rows, in] or [rows, 1], float32."""
        wide = by_group.float()
        return wide if self.group is None else wide.repeat_interleave(self.group, 1)[:, : self.shape[1]]
