"""Sums along each row, in an order that the other rows do not change."""

from __future__ import annotations

import torch
from torch import Tensor


def running_sums(values: Tensor) -> Tensor:
    """[R, C] float64: at each place the sum up to it. values: [R, C]."""
    if values.device.type == "cpu":
        return values.cumsum(-1, dtype=torch.float64)
    return sums_row_by_row(values)


def sums_row_by_row(values: Tensor) -> Tensor:
    """The same, one row at a time. CUDA's kernel parts a row among as many threads as the number of rows leaves it, and
    another partition adds in another order."""
    sums = torch.empty_like(values, dtype=torch.float64)
    for row in range(len(values)):
        torch.cumsum(values[row : row + 1], -1, dtype=torch.float64, out=sums[row : row + 1])
    return sums
