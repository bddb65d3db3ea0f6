"""Sums along each row, in an order that the other rows do not change."""

from __future__ import annotations

import torch
from torch import Tensor


def running_sums(values: Tensor) -> Tensor:
    """[R, C] float64: at each place the sum up to it. values: [R, C]."""
    if values.device.type == "cpu":
        return values.cumsum(-1, dtype=torch.float64)
    return sums_in_pairs(values)


def sums_in_pairs(values: Tensor) -> Tensor:
    """The same, of each row beside a copy of it.

    On CUDA devices PyTorch sums a single row by another kernel than several (cub's scan, whose order is not the same at
    every run), and several with as many threads for each as their number leaves it. Two have always the same.
    """
    sums = torch.empty_like(values, dtype=torch.float64)
    for row, out in zip(values, sums, strict=True):
        out.copy_(row.expand(2, -1).cumsum(-1, dtype=torch.float64)[0])
    return sums
