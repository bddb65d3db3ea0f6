"""Drawing one token from each of a batch of laws."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_BLOCK = 64
"""Weights summed at once: cumulative sums run over blocks, then inside one block."""


def draw_tokens(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One token per row by inversion of the cumulative weights.

    Args:
        weights: [R, V], not negative, not necessarily summing to one; each row has a positive entry.
        uniforms: [R] float64 in [0, 1).

    Returns:
        [R] int64. A token of weight 0 is never drawn.
    """
    num_rows, vocab_size = weights.shape
    if vocab_size % _BLOCK:
        weights = pad(weights, (0, -vocab_size % _BLOCK))
    blocks = weights.view(num_rows, -1, _BLOCK)
    # float64: a sum of float32 weights would round the smaller ones away.
    cumulative = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    thresholds = cumulative[:, -1:] * uniforms.to(weights.device)[:, None]
    block = _first_above(cumulative, thresholds)
    before = pad(cumulative, (1, 0)).gather(-1, block)
    rows = torch.arange(num_rows, device=weights.device)
    within = blocks[rows, block[:, 0]].cumsum(-1, dtype=torch.float64)
    return (block * _BLOCK + _first_above(within, thresholds - before))[:, 0]


def row_argmax(values: Tensor) -> Tensor:
    """[R] int64, the first index of each row's maximum. values: [R, V], without NaN."""
    if values.device.type != "cpu" or values.dtype == torch.bfloat16:
        return values.argmax(-1)
    return torch.from_numpy(values.numpy().argmax(-1))  # a tenth of the time of torch's


def _first_above(cumulative: Tensor, thresholds: Tensor) -> Tensor:
    """[R, 1] the first index whose cumulative weight exceeds the threshold.

    Its weight is positive, since the cumulative weight before it does not exceed the threshold. Rounding may
    lift the threshold to the total, which nothing exceeds: it is held just below.
    """
    below_total = torch.nextafter(cumulative[:, -1:], torch.zeros_like(thresholds))
    return torch.searchsorted(cumulative, torch.minimum(thresholds, below_total), right=True)
