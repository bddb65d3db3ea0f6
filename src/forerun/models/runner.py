"""From rows of sequences to the arrays of one forward. Nothing below sees a sequence's cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.cache import SequenceCache
from forerun.kernels.partition import MIN_ROWS
from forerun.models.attention.base import Layout, Pages, Segment, Write
from forerun.models.attention.chain_mask import chain_segments
from forerun.models.attention.tree_mask import tree_segments
from forerun.models.attention.views import Views
from forerun.models.base import Rows


def lay_out(batch: Sequence[Rows], views: Views) -> Layout:
    """Pack the rows of several sequences, and add them to their caches' scratch."""
    num_new = sum(len(rows.token_ids) for rows in batch)
    padding = max(0, MIN_ROWS - num_new)
    writes: list[Write] = []
    segments: list[Segment] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    for sequence, rows in enumerate(batch):
        cache, start = _cache_of(rows), len(positions)
        end = start + len(rows.token_ids)
        first = _feed(cache, rows)
        writes.append(Write(sequence, cache.length + first, start, end))
        more = padding if end == num_new else 0
        parents = cache.scratch_parents
        if parents == list(range(-1, len(parents) - 1)):
            position = cache.length + first
            positions += range(position, position + end - start)
            segments += chain_segments(sequence, position, start, end - start, more, views)
        else:
            tree, tree_positions = tree_segments(sequence, cache.length, parents, first, start, more, views)
            positions += tree_positions
            segments += tree
        logit_rows += range(end - rows.num_wanted, end)
    positions += positions[-1:] * padding
    num_logits, selected = len(logit_rows), None
    if num_logits != num_new:
        logit_rows += [num_new + padding - 1] * (MIN_ROWS - num_logits)
        selected = torch.tensor(logit_rows).to(views.device, non_blocking=True)
    return Layout(
        num_rows=num_new + padding,
        num_new=num_new,
        num_positions=max(positions) + 1,
        token_ids=_token_ids(batch, padding, views.device),
        positions=torch.tensor(positions).to(views.device, non_blocking=True),
        logit_rows=selected,
        num_logits=num_logits,
        pages=[Pages(cache.keys, cache.values) for cache in map(_cache_of, batch)],
        writes=writes,
        segments=segments,
    )


def _feed(cache: SequenceCache, rows: Rows) -> int:
    """The first of the rows in the cache's scratch, to which they are added unless they go on from a middle layer."""
    first = cache.num_scratch
    if rows.hidden is not None:
        return first - len(rows.token_ids)
    cache.feed(range(first - 1, first - 1 + len(rows.token_ids)) if rows.parents is None else rows.parents)
    return first


def _token_ids(batch: Sequence[Rows], padding: int, device: torch.device) -> Tensor:
    """[num_rows] int64; the last one is repeated. Tokens that lie on the device are not read."""
    if not any(isinstance(rows.token_ids, Tensor) for rows in batch):
        tokens = [token_id for rows in batch for token_id in rows.token_ids]
        return torch.tensor(tokens + tokens[-1:] * padding).to(device, non_blocking=True)
    parts = [torch.as_tensor(rows.token_ids, dtype=torch.int64).to(device, non_blocking=True) for rows in batch]
    return torch.cat([*parts, parts[-1][-1:].expand(padding)])


def _cache_of(rows: Rows) -> SequenceCache:
    """Models of this package compute in caches that they have made."""
    if not isinstance(rows.cache, SequenceCache):
        raise TypeError(f"rows came with a {type(rows.cache).__name__}, which no model of this kind has made")
    return rows.cache
