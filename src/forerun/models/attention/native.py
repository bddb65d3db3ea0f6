"""Attention by the native kernels, for decoders that compute the rest of a layer in PyTorch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.kernels.cpu.library import AttentionStruct, Library, RowsStruct
from forerun.kernels.cpu.page_layout import PAGE
from forerun.kernels.partition import AttentionShape, PathPlan
from forerun.models.attention.base import LayerAttention, Layout, Plan
from forerun.models.attention.path_planner import PathPlanner


class NativeAttention:
    """`Attention` along each row's path, in pages.

    Args:
        dtype: of the result.
        cache_dtype: of keys and values, bfloat16 or float32.
    """

    def __init__(self, library: Library, dtype: torch.dtype, cache_dtype: torch.dtype = torch.bfloat16) -> None:
        self._library, self._dtype, self._cache_dtype = library, dtype, cache_dtype
        self._starts: list[int] = []

    def planner(self, layers: Sequence[LayerAttention], device: torch.device) -> PathPlanner:
        """Return the planner for a model with these layers, whose plans `forward` reads (`Attention.planner`)."""
        planner = PathPlanner(layers, self._cache_dtype)
        self._starts = [start * self._cache_dtype.itemsize for start in planner.layout.layer_starts]
        return planner

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, layout: Layout, form: AttentionShape
    ) -> Tensor:
        """Store the new keys and values, and attend with every row to its own path (`Attention.forward`)."""
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        sinks = None if form.sinks is None else form.sinks.detach().float().contiguous()
        shape = AttentionStruct(
            offset=self._starts[layer],
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_width=key.shape[2],
            value_width=value.shape[2],
            page=PAGE,
            cache_float32=self._cache_dtype == torch.float32,
            window=form.window or 0,
            scale=form.scale,
            softcap=form.softcap or 0.0,
            sinks=None if sinks is None else sinks.data_ptr(),
        )
        rows = rows_struct(layout.plan)
        out = torch.empty(len(query), query.shape[1] * value.shape[2])
        pointers = [tensor.data_ptr() for tensor in (query, key, value, out)]
        self._library.attention(ctypes.byref(shape), ctypes.byref(rows), *pointers, torch.get_num_threads())
        return out.to(self._dtype)


def rows_struct(
    plan: Plan, cosines: Tensor | None = None, sines: Tensor | None = None, *, are_blocks: bool = False
) -> RowsStruct:
    """Return the rows of a forward in the library's form. The plan, a `PathPlan`, and the tables must outlive it.

    Args:
        cosines, sines: [positions, D / 2] float32, of what rotates queries and keys itself.
        are_blocks: of blocks, whose rows are rotated by their slots.
    """
    assert isinstance(plan, PathPlan)
    paths = plan.paths
    arrays = (paths.sequence, paths.position, paths.slot, paths.prefix, paths.tail_start, paths.tail)
    addresses = [array.ctypes.data for array in (*arrays, plan.pages, plan.page_start)]
    tables = [None if table is None else table.data_ptr() for table in (cosines, sines)]
    return RowsStruct(*addresses, *tables, len(paths.slot), are_blocks)
