"""The product whose result for a row does not depend on the other rows, with weights packed for oneDNN.

From MIN_ROWS rows up, packed products give the same bits for a row whatever the others are. They do not share the trap
of stock float32 products on CPU either, which take several times longer for 2-16 rows than for one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_AMX_ROWS = 32
"""Rows up to which oneDNN's bfloat16 products by matrix tiles (AMX) give a row the same bits whatever their number."""


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
        by_tiles = weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
        self.max_rows = _AMX_ROWS if by_tiles else 2**62

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out]."""
        if x.shape[-2] > self.max_rows:
            return torch.cat([self.forward(part) for part in x.tensor_split(self._num_parts(x), -2)], -2)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + forward(x), in one pass. residual: [..., out]."""
        if x.shape[-2] > self.max_rows:
            count = self._num_parts(x)
            parts = zip(residual.tensor_split(count, -2), x.tensor_split(count, -2), strict=True)
            return torch.cat([self.add_to(part, rows) for part, rows in parts], -2)
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
        return y

    def rows(self, index: Tensor) -> Tensor:
        """Rows of the weight, all of which is unpacked for it. index: [n] int64 -> [n, in] float32."""
        return self.weight.to_dense()[index].float()

    def _num_parts(self, x: Tensor) -> int:
        """Parts of nearly equal size, none of them small, of at most max_rows rows."""
        return -(-x.shape[-2] // self.max_rows)
