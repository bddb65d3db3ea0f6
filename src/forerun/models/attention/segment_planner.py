"""From rows of sequences to the plan of the PyTorch reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.cache import ContiguousCache, PagePool, bytes_per_page
from forerun.kernels.partition import MIN_ROWS
from forerun.models.attention.base import LayerAttention, PackedRows, cache_of
from forerun.models.attention.block_mask import block_segment
from forerun.models.attention.chain_mask import chain_segments
from forerun.models.attention.segment_plan import Segment, SegmentPlan, Stored, Write
from forerun.models.attention.tree_mask import tree_segments
from forerun.models.attention.views import Views


class SegmentPlanner:
    """`Planner` of `ReferenceAttention`.

    Args:
        dtype: of the attention scores, and of keys and values: float32, or float64 for a float64 model. Converting a
            narrower cache at every step costs more than reading the wider one.
        device: where the model computes.
    """

    min_rows = MIN_ROWS

    def __init__(self, layers: Sequence[LayerAttention], dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self._dtype = dtype
        self._shapes = [layer.shape for layer in layers]
        self.pool = PagePool(bytes_per_page(self._shapes, dtype))
        self._views = Views(tuple({layer.view: None for layer in layers}), dtype, device)

    def new_cache(self) -> ContiguousCache:
        """An empty cache for one sequence."""
        return ContiguousCache(self.pool, self._shapes, self._dtype, self.device)

    def plan(self, batch: Sequence[PackedRows], padding: int) -> SegmentPlan:
        """As `Planner.plan`."""
        stored: list[Stored] = []
        writes: list[Write] = []
        segments: list[Segment] = []
        for sequence, rows in enumerate(batch):
            cache, start = cache_of(ContiguousCache, rows.cache), rows.start
            stored.append(Stored(cache.keys, cache.values))
            writes.append(Write(sequence, cache.length + rows.first, start, rows.end))
            more = padding if sequence == len(batch) - 1 else 0
            if rows.is_block:
                segments.append(block_segment(sequence, cache.length + rows.first, rows, more, self._views))
            elif rows.is_chain:
                n = rows.end - start
                segments += chain_segments(sequence, cache.length + rows.first, start, n, more, self._views)
            else:
                parents = cache.scratch_parents
                segments += tree_segments(sequence, cache.length, parents, rows.first, start, more, self._views)
        return SegmentPlan(stored, writes, segments)
