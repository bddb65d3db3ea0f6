"""Attention in plain PyTorch, segment by segment."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.attention_reference import attend
from forerun.kernels.partition import Form
from forerun.models.attention.base import Layout


class ReferenceAttention:
    """`Attention` in a fixed order of additions, on any device.

    Args:
        dtype: of the result.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, layout: Layout, form: Form) -> Tensor:
        """As `Attention.forward`."""
        for write in layout.writes:
            pages, slots = layout.pages[write.sequence], slice(write.slot, write.slot + write.end - write.start)
            pages.keys[layer][:, slots] = key[write.start : write.end].transpose(0, 1)
            pages.values[layer][:, slots] = value[write.start : write.end].transpose(0, 1)
        view = query.shape[1] // key.shape[1], form.window
        out = query.new_empty(len(query), query.shape[1] * value.shape[2], dtype=self._dtype)
        for s in layout.segments:
            keys, values = layout.pages[s.sequence].keys[layer], layout.pages[s.sequence].values[layer]
            if s.slots is not None:
                keys, values = keys[:, s.slots], values[:, s.slots]
            rows = query[s.start : s.end] if s.rows is None else query[s.rows]
            mixed = attend(rows, keys, values, s.partitions[view], form)
            if s.rows is None:
                out[s.start : s.end].view(mixed.shape).copy_(mixed)
            else:
                out.view(-1, *mixed.shape[1:])[s.rows] = mixed.to(self._dtype)
        return out
