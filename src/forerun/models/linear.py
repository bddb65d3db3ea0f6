"""Linear layers whose result for a row does not depend on how many rows it is computed with.

On CPU, weights are packed once for oneDNN. Packed products give the same bits for a row whatever its company (from
MIN_ROWS rows up), and do not share the trap of stock float32 products there, which take several times longer for 2-16
rows than for one. Elsewhere, and in float64, the stock product is used, and `models/exactness.py` says what that costs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN packs weights of this type here."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class Linear(nn.Module):
    """y = x W^T + b, optionally plus a residual in the same pass.

    Args:
        weight: [out, in]. bias: [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = can_pack(weight.dtype, weight.device)
        weight = weight.detach()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self.packed else weight
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out]."""
        if self.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return y
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + forward(x). residual: [..., out]."""
        if self.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
            return y
        return residual + F.linear(x, self.weight, self.bias)


def pack_module(module: nn.Module) -> None:
    """Replace, in place, every linear layer below `module` (nn.Linear and GPT-2's Conv1D) that can be packed."""
    from transformers.pytorch_utils import Conv1D

    for name, child in list(module.named_children()):
        if type(child) is nn.Linear and can_pack(child.weight.dtype, child.weight.device):
            setattr(module, name, Linear(child.weight, child.bias))
        elif type(child) is Conv1D and can_pack(child.weight.dtype, child.weight.device):
            setattr(module, name, Linear(child.weight.T, child.bias))
        else:
            pack_module(child)
