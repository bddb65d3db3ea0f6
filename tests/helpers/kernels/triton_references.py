"""What kernels of Triton's compute, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.kernels.triton.rotation import RotationTables


def gated_reference(sums: Tensor) -> Tensor:
    """What `gated` computes, in PyTorch: [rows, width] float32."""
    total = sums[0].clone()
    for part in sums[1:]:
        total += part
    gate, up = total.chunk(2, -1)
    return F.silu(gate) * up


def add_and_norm_reference(
    x: Tensor, sums: Tensor | None, bias: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """What `add_and_norm` computes, in PyTorch: x and its norm, float32."""
    if sums is not None:
        total = sums[0].clone()
        for part in sums[1:]:
            total += part
        x = x + (total if bias is None else total + bias)
    return x, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate_reference(
    heads: Tensor, norms: Tensor | None, eps: float, tables: RotationTables, positions: Tensor, num_heads: int
) -> Tensor:
    """What `rotate_and_write` makes of queries, keys and values, in PyTorch.

    Args:
        heads: [rows, H + 2 H_kv, D] float32, bias included. positions: [rows] int64.

    Returns:
        The same shape, float32.
    """
    num_kv_heads = (heads.shape[1] - num_heads) // 2
    turned, values = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
    if norms is not None:
        weights = torch.cat([norms[:1].expand(num_heads, -1), norms[1:].expand(num_kv_heads, -1)])
        turned = turned * torch.rsqrt(turned.square().mean(-1, keepdim=True) + eps) * weights
    cos, sin = (table[positions].unsqueeze(1) for table in (tables.cos, tables.sin))
    left, right = turned.chunk(2, -1)
    return torch.cat([torch.cat([left * cos - right * sin, right * cos + left * sin], -1), values], 1)
