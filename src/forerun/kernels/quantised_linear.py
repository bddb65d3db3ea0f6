"""The product with weights of 8 or 4 bits: sums of whole numbers, which have no order, scaled in a fixed one.

Activations are quantised to 8 bits, with one scale per row, or per row and group of inputs as the weight has them. A
row's result depends on that row alone. Any other implementation gives the same bits.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forerun.kernels.plain_linear import PlainLinear
from forerun.kernels.quantise import symmetric_codes
from forerun.kernels.quantised_weight import QuantisedWeight
from forerun.kernels.row_invariant_linear import PackedLinear, can_pack

_EXACT = 1024
"""Inputs whose products of codes, 127 * 128 each, add up to less than 2^24, below which float32 holds every whole
number: such sums are exact in any order."""
_PART = 1 << 22
"""Sums of groups held together."""


class QuantisedLinear(nn.Module):
    """y = x W^T + b. Inputs and results are of x's float type; all between is float32.

    With one scale per channel, y = float(sum of code products) * (scale of x * scale of W) + b. By groups, in order, y
    = 0; y += (scale of W * scale of x) * float(sum of code products); with minima, y += (minimum * scale of x) *
    float(sum of x's codes); after the last group, y += b. Nothing is fused. A row with NaN or infinity gives NaN.

    The codes are brought to float32, in which they are multiplied, at the first product: four bytes a number.

    Args:
        weight: [out, in]. bias: [out] or None.
    """

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.quantised = weight
        self.bias = None if bias is None else bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out]."""
        return self._product(x).to(x.dtype)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + forward(x), added in float32. residual: [..., out]."""
        return (self._product(x) + residual.float()).to(residual.dtype)

    def _product(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out] float32."""
        rows = x.reshape(-1, self.in_features).float()
        y = self._by_channel(rows) if self.quantised.group is None else self._by_groups(rows)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)

    def _by_channel(self, x: Tensor) -> Tensor:
        codes, scale = symmetric_codes(x)
        sums = torch.zeros(len(x), self.out_features, dtype=torch.int32, device=x.device)
        for part, linear in zip(torch.split(codes, _EXACT, 1), self._channel_parts, strict=True):
            sums += linear.forward(part.contiguous()).to(torch.int32)
        return sums.float() * (scale * self.quantised.scale[:, 0])

    @cached_property
    def _channel_parts(self) -> list[PackedLinear | PlainLinear]:
        """The codes about their zero, some inputs at a time."""
        codes = self.quantised.codes
        make = PackedLinear if can_pack(torch.float32, codes.device) else PlainLinear
        return [make(part.float() - self.quantised.zero) for part in torch.split(codes, _EXACT, 1)]

    def _by_groups(self, x: Tensor) -> Tensor:
        if len(x) == 0:
            return x.new_empty(0, self.out_features)
        count = max(1, _PART // (self.out_features * self.quantised.scale.shape[1]))
        return torch.cat([self._of_groups(rows) for rows in torch.split(x, count)])

    def _of_groups(self, x: Tensor) -> Tensor:
        weight, (operand, scale_w, minimum) = self.quantised, self._group_operands
        assert weight.group is not None
        groups = F.pad(x, (0, -x.shape[1] % weight.group)).view(len(x), -1, weight.group)
        codes, scale = symmetric_codes(groups)
        codes, scale = codes.transpose(0, 1), scale.transpose(0, 1)  # [groups, rows, 32], [groups, rows, 1]
        terms = torch.bmm(codes, operand) * (scale_w * scale)
        offsets = None if minimum is None else (minimum * scale) * codes.sum(-1, keepdim=True)
        total = torch.zeros_like(terms[0])
        for index, term in enumerate(terms):
            total += term
            if offsets is not None:
                total += offsets[index]
        return total

    @cached_property
    def _group_operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """[groups, 32, out] codes about their zero; [groups, 1, out] scales and minima."""
        weight = self.quantised
        assert weight.group is not None
        codes = F.pad(weight.codes.float() - weight.zero, (0, -self.in_features % weight.group))
        operand = codes.view(self.out_features, -1, weight.group).permute(1, 2, 0).contiguous()
        scale, minimum = (
            None if each is None else each.float().T.contiguous()[:, None] for each in (weight.scale, weight.minimum)
        )
        assert scale is not None
        return operand, scale, minimum
