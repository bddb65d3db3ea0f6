"""The PyTorch reference of attention: segments of chains and blocks, the planner, and the computation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from forerun.kernels.partition import KV_BLOCK, MIN_ROWS, AttentionShape, tails
from forerun.kernels.torch.attention import attend
from forerun.kv_cache import PagePool
from forerun.kv_cache.contiguous import ContiguousCache, bytes_per_page
from forerun.kv_cache.recurrent_state import StateMaker
from forerun.models.attention.base import LayerAttention, Layout, PackedRows, cache_of
from forerun.models.attention.segment_plan import Segment, SegmentPlan, StoredKeys, Views, Write, repeat_last
from forerun.models.attention.tree_mask import tree_segments


def chain_segments(sequence: int, first: int, start: int, n: int, padding: int, views: Views) -> list[Segment]:
    """Return the segments of n rows of a chain from position `first` on, the first of which is packed row `start`.

    A chain is cut where it crosses into another block of keys: what a row adds up, and in which order, then depends
    on its position alone.

    Args:
        padding: packed rows after these that attend as the last one does; their results are not read.
    """
    segments = []
    done = 0
    while done < n:
        block, offset = divmod(first + done, KV_BLOCK)
        take = min(n - done, KV_BLOCK - offset)
        more = padding if done + take == n else 0
        columns = tails(offset + take)
        mask = _causal(views.dtype)[offset : offset + take, :columns]
        if take > 1:
            mask = repeat_last(mask, more)
        positions = range(first + done, first + done + take)
        partitions = views.partitions(mask, block * KV_BLOCK + columns, [*positions, *[positions[-1]] * more])
        segments.append(Segment(sequence, start + done, start + done + take + more, None, None, partitions))
        done += take
    return segments


@cache
def _causal(dtype: torch.dtype) -> Tensor:
    """Return the causal mask, [KV_BLOCK, KV_BLOCK]: row i sees the first i + 1 keys of a block."""
    return torch.full((KV_BLOCK, KV_BLOCK), -torch.inf, dtype=dtype).triu_(1)


def block_segment(sequence: int, first: int, rows: PackedRows, padding: int, views: Views) -> Segment:
    """Return one segment of all rows of a block. A window is counted from the last row, for all rows alike.

    Args:
        first: position of the first row.
        padding: packed rows after these that see the same.
    """
    last = first + rows.end - rows.start - 1
    columns = tails(last + 1)
    mask = torch.zeros(1, columns, dtype=views.dtype)
    mask[0, last + 1 :] = -torch.inf
    end = rows.end + padding
    partitions = views.partitions(mask, columns, [last] * (end - rows.start))
    return Segment(sequence, rows.start, end, None, None, partitions)


class SegmentPlanner:
    """`Planner` of `ReferenceAttention`.

    Args:
        dtype: of the attention scores, and of keys and values: float32, or float64 for a float64 model. Converting a
            narrower cache at every step costs more than reading the wider one.
        device: where the model computes.
    """

    min_rows = MIN_ROWS
    new_state: StateMaker | None = None

    def __init__(self, layers: Sequence[LayerAttention], dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self._dtype = dtype
        self._shapes = [layer.shape for layer in layers]
        self.pool = PagePool(bytes_per_page(self._shapes, dtype))
        self._views = Views(tuple({layer.view: None for layer in layers}), dtype, device)

    def new_cache(self) -> ContiguousCache:
        """Return an empty cache for one sequence."""
        state = None if self.new_state is None else self.new_state()
        return ContiguousCache(self.pool, self._shapes, self._dtype, self.device, state)

    def plan(self, batch: Sequence[PackedRows], padding: int) -> SegmentPlan:
        """Return what the rows write and see (`Planner.plan`)."""
        stored: list[StoredKeys] = []
        writes: list[Write] = []
        segments: list[Segment] = []
        for sequence, rows in enumerate(batch):
            cache = cache_of(ContiguousCache, rows.cache)
            start = rows.start
            stored.append(StoredKeys(cache.keys, cache.values))
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


class ReferenceAttention:
    """`AttentionBackend` in a fixed order of additions, on any device.

    Args:
        dtype: of the result.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def planner(self, layers: Sequence[LayerAttention], device: torch.device) -> SegmentPlanner:
        """Return the planner for a model with these layers, whose plans `forward` reads (`Attention.planner`). Scores
        are computed in float32, or float64 for a float64 model."""
        return SegmentPlanner(layers, torch.float64 if self._dtype == torch.float64 else torch.float32, device)

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, layout: Layout, form: AttentionShape
    ) -> Tensor:
        """Store the new keys and values, and attend with every row to its own path (`Attention.forward`)."""
        plan = layout.plan
        assert isinstance(plan, SegmentPlan)
        for write in plan.writes:
            stored = plan.stored[write.sequence]
            slots = slice(write.slot, write.slot + write.end - write.start)
            stored.keys[layer][:, slots] = key[write.start : write.end].transpose(0, 1)
            stored.values[layer][:, slots] = value[write.start : write.end].transpose(0, 1)
        return self.attend(layer, query, layout, form)

    def attend(self, layer: int, query: Tensor, layout: Layout, form: AttentionShape) -> Tensor:
        """Attend with every row to its own path among keys and values that are stored. Arguments as of `forward`."""
        plan = layout.plan
        assert isinstance(plan, SegmentPlan)
        heads, _, width = plan.stored[0].values[layer].shape
        view = query.shape[1] // heads, form.window
        out = query.new_empty(len(query), query.shape[1] * width, dtype=self._dtype)
        for s in plan.segments:
            keys = plan.stored[s.sequence].keys[layer]
            values = plan.stored[s.sequence].values[layer]
            if s.slots is not None:
                keys = keys[:, s.slots]
                values = values[:, s.slots]
            rows = query[s.start : s.end] if s.rows is None else query[s.rows]
            attended = attend(rows, keys, values, s.partitions[view], form)
            if s.rows is None:
                out[s.start : s.end].view(attended.shape).copy_(attended)
            else:
                out.view(-1, *attended.shape[1:])[s.rows] = attended.to(self._dtype)
        return out
