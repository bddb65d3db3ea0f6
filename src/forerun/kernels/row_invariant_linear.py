"""The product whose result for a row does not depend on the other rows, with weights packed for oneDNN.

From MIN_ROWS rows up, packed products give the same bits for a row whatever the others are. They do not share the trap
of stock float32 products on CPU either, which take several times longer for 2-16 rows than for one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN packs weights of this type here."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class PackedLinear(nn.Module):
    """y = x W^T + b, on CPU.

    Args:
        weight: [out, in], of a type that `can_pack` accepts. bias: [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out]."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + forward(x), in one pass. residual: [..., out]."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
        return y
