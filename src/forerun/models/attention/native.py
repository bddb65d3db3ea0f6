"""Attention by the native kernels, for decoders that compute the rest of a layer in PyTorch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from forerun.kernels.cpu.library import AttentionStruct, Library, RowsStruct
from forerun.kernels.cpu.page_layout import CACHE_FORMATS, PAGE, PageLayout
from forerun.kernels.partition import AttentionShape, PathPlan, RowPaths
from forerun.kv_cache import PagedCache, PagePool
from forerun.kv_cache.recurrent_state import StateMaker
from forerun.models.attention.base import LayerAttention, Layout, PackedRows, Plan, cache_of

# Plans of the native and the Triton kernels: the path of every row, in arrays.

Tails = list[list[int]]


class PathPlanner:
    """`Planner` of the native and the Triton kernels. The arrays of a forward lie on the host, unpadded: the native
    kernels compute there, and the Triton decoder pads them and copies them to its device at once.

    Args:
        cache_dtype: of keys and values, one of `page_layout.CACHE_FORMATS`; on a device float32 or bfloat16.
        layout: of pages on the device where the Triton kernels compute; None: the native ones compute.
    """

    min_rows = 1
    device = torch.device("cpu")
    new_state: StateMaker | None = None

    def __init__(
        self, layers: Sequence[LayerAttention], cache_dtype: torch.dtype, layout: PageLayout | None = None
    ) -> None:
        self.layout = layout or PageLayout([layer.shape for layer in layers], cache_dtype)
        self.pool = PagePool(self.layout.nbytes, self.layout.new_page)

    def new_cache(self) -> PagedCache:
        """Return an empty cache for one sequence."""
        return PagedCache(self.pool, self.layout, state=None if self.new_state is None else self.new_state())

    def plan(self, batch: Sequence[PackedRows], padding: int) -> PathPlan:
        """Return the path of every row (`Planner.plan`). There is no padding: every forward has a row."""
        assert padding == 0
        caches = [cache_of(PagedCache, rows.cache) for rows in batch]
        if len(batch) == 1 and batch[0].is_chain:
            (cache,), (rows,) = caches, batch  # by far the most frequent forward: a single chain, or block
            n = rows.end - rows.start
            first = cache.length + rows.first
            slot = np.arange(first, first + n, dtype=np.int32)
            position = np.full_like(slot, first + n - 1) if rows.is_block else slot
            nothing = np.zeros(n + 1, np.int32)
            paths = RowPaths(nothing[:n], position, slot, position + np.int32(1), nothing, nothing[:0])
            return PathPlan(paths, cache.addresses, np.array([0, len(cache.pages)], np.int32))
        starts = [0, *accumulate(len(cache.pages) for cache in caches)]
        addresses = np.concatenate([cache.addresses for cache in caches])
        return PathPlan(_paths(batch), addresses, np.array(starts, np.int32))


def _paths(batch: Sequence[PackedRows]) -> RowPaths:
    sequence: list[int] = []
    position: list[int] = []
    slot: list[int] = []
    prefix: list[int] = []
    tails: Tails = []
    for index, rows in enumerate(batch):
        n = rows.end - rows.start
        first = rows.cache.length + rows.first
        sequence += [index] * n
        position += [first + n - 1] * n if rows.is_block else rows.positions  # a path ends at its position
        slot += range(first, first + n)
        if rows.is_block:
            prefix += [first + n] * n
            tails += [[]] * n
        elif rows.is_chain:
            prefix += range(first + 1, first + n + 1)
            tails += [[]] * n
        else:
            tree_prefix, tree_tails = _tree_paths(rows.cache.length, rows.cache.scratch_parents)
            prefix += tree_prefix[rows.first :]
            tails += tree_tails[rows.first :]
    tail_start = [0, *accumulate(map(len, tails))]
    tail = np.fromiter(chain.from_iterable(tails), np.int32, tail_start[-1])
    sequences, positions, slots, prefixes = np.array([sequence, position, slot, prefix], np.int32)
    return RowPaths(sequences, positions, slots, prefixes, np.array(tail_start, np.int32), tail)


def _tree_paths(length: int, parents: Sequence[int]) -> tuple[list[int], Tails]:
    """Return the prefix and tail of every scratch row. The leading chain of the scratch belongs to the prefixes."""
    stem = next((row for row, parent in enumerate(parents) if parent != row - 1), len(parents))
    prefix = list(range(length + 1, length + stem + 1))
    tails: Tails = [[] for _ in range(stem)]
    for row, parent in enumerate(parents[stem:], stem):
        if parent < stem:
            prefix.append(length + parent + 1)
            tails.append([length + row])
        else:
            prefix.append(prefix[parent])
            tails.append([*tails[parent], length + row])
    return prefix, tails


class NativeAttention:
    """`AttentionBackend` along each row's path, in pages.

    Args:
        dtype: of the result.
        cache_dtype: of keys and values, one of `page_layout.CACHE_FORMATS`.
    """

    def __init__(self, library: Library, dtype: torch.dtype, cache_dtype: torch.dtype = torch.bfloat16) -> None:
        self._library = library
        self._dtype = dtype
        self._cache_dtype = cache_dtype
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
        query = query.contiguous()
        key = key.contiguous()
        value = value.contiguous()
        sinks = None if form.sinks is None else form.sinks.detach().float().contiguous()
        shape = AttentionStruct(
            offset=self._starts[layer],
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_width=key.shape[2],
            value_width=value.shape[2],
            page=PAGE,
            cache_format=CACHE_FORMATS[self._cache_dtype],
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


def rows_struct(plan: Plan, *tables: Tensor, are_blocks: bool = False) -> RowsStruct:
    """Return the rows of a forward in the library's form. The plan, a `PathPlan`, and the tables must outlive it.

    Args:
        tables: cosines and sines, [positions, rotated / 2] float32, of what rotates queries and keys itself; then those
            of another rotation, if there is one.
        are_blocks: of blocks, whose rows are rotated by their slots.
    """
    assert isinstance(plan, PathPlan)
    paths = plan.paths
    arrays = (paths.sequence, paths.position, paths.slot, paths.prefix, paths.tail_start, paths.tail)
    addresses = [array.ctypes.data for array in (*arrays, plan.pages, plan.page_start)]
    first = [table.data_ptr() for table in tables[:2]]
    others = [table.data_ptr() for table in tables[2:]]
    return RowsStruct(*addresses, *(first or (None, None)), len(paths.slot), are_blocks, *others)
