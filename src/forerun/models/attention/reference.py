"""Attention in plain PyTorch, segment by segment."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.kernels.attention_reference import attend
from forerun.kernels.partition import Form
from forerun.models.attention.base import LayerAttention, Layout
from forerun.models.attention.segment_plan import SegmentPlan
from forerun.models.attention.segment_planner import SegmentPlanner


class ReferenceAttention:
    """`Attention` in a fixed order of additions, on any device.

    Args:
        dtype: of the result.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def planner(self, layers: Sequence[LayerAttention], device: torch.device) -> SegmentPlanner:
        """As `Attention.planner`. Scores are computed in float32, or float64 for a float64 model."""
        return SegmentPlanner(layers, torch.float64 if self._dtype == torch.float64 else torch.float32, device)

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, layout: Layout, form: Form) -> Tensor:
        """As `Attention.forward`."""
        plan = layout.plan
        assert isinstance(plan, SegmentPlan)
        for write in plan.writes:
            stored, slots = plan.stored[write.sequence], slice(write.slot, write.slot + write.end - write.start)
            stored.keys[layer][:, slots] = key[write.start : write.end].transpose(0, 1)
            stored.values[layer][:, slots] = value[write.start : write.end].transpose(0, 1)
        view = query.shape[1] // key.shape[1], form.window
        out = query.new_empty(len(query), query.shape[1] * value.shape[2], dtype=self._dtype)
        for s in plan.segments:
            keys, values = plan.stored[s.sequence].keys[layer], plan.stored[s.sequence].values[layer]
            if s.slots is not None:
                keys, values = keys[:, s.slots], values[:, s.slots]
            rows = query[s.start : s.end] if s.rows is None else query[s.rows]
            mixed = attend(rows, keys, values, s.partitions[view], form)
            if s.rows is None:
                out[s.start : s.end].view(mixed.shape).copy_(mixed)
            else:
                out.view(-1, *mixed.shape[1:])[s.rows] = mixed.to(self._dtype)
        return out
