"""Drawing one token from each of a batch of laws."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_tokens(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One token per row by inversion of the cumulative weights.

    Args:
        weights: [R, V], not negative, not necessarily summing to one; each row has a positive entry.
        uniforms: [R] float64 in [0, 1).

    Returns:
        [R] int64. A token of weight 0 is never drawn: with t = u * total < total, the first index whose
        cumulative weight exceeds t has a cumulative weight above its predecessor's.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    thresholds = cumulative[:, -1:] * uniforms.to(weights.device)[:, None]
    return torch.searchsorted(cumulative, thresholds, right=True)[:, 0]
