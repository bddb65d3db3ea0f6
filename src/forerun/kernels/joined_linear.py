"""Products with several weights of which not all are in the same codes, as one layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from forerun.kernels.quantise import largest_row_code
from forerun.kernels.quantised_linear import QuantisedLinear
from forerun.kernels.quantised_weight import QuantisedWeight


class JoinedLinear(nn.Module):
    """The outputs of each weight, one after another. All are multiplied with the same codes of an activation.

    Args:
        weights: each [out, in], of the same number of inputs. bias: [sum of outs] or None.
    """

    def __init__(self, weights: Sequence[QuantisedWeight], bias: Tensor | None = None) -> None:
        super().__init__()
        self._counts = [weight.shape[0] for weight in weights]
        self.out_features, self.in_features = sum(self._counts), weights[0].shape[1]
        limit = min(largest_row_code(weight) for weight in weights)
        biases = [None] * len(weights) if bias is None else torch.split(bias, self._counts)
        self._parts = [QuantisedLinear(weight, each, limit) for weight, each in zip(weights, biases, strict=True)]

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out] in x's type."""
        return torch.cat([part.forward(x) for part in self._parts], -1)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + forward(x), added in float32. residual: [..., out]."""
        residuals = torch.split(residual, self._counts, -1)
        return torch.cat([part.add_to(each, x) for part, each in zip(self._parts, residuals, strict=True)], -1)

    def rows(self, index: Tensor) -> Tensor:
        """Rows of the weights, which count on from one to the next. index: [n] int64 -> [n, in] float32."""
        result = torch.empty(len(index), self.in_features, device=index.device)
        first = 0
        for count, part in zip(self._counts, self._parts, strict=True):
            here = (index >= first) & (index < first + count)
            result[here] = part.rows(index[here] - first)
            first += count
        return result
