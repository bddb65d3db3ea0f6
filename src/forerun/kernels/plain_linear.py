"""The stock product, for float64 and for devices other than the CPU."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class PlainLinear(nn.Module):
    """y = x W^T + b. Whether a row's result depends on the other rows is up to the device.

    Args:
        weight: [out, in]. bias: [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out]."""
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + forward(x). residual: [..., out]."""
        return residual + F.linear(x, self.weight, self.bias)

    def rows(self, index: Tensor) -> Tensor:
        """Rows of the weight. index: [n] int64 -> [n, in] float32."""
        return self.weight[index].float()
