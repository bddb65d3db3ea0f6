"""How the new rows of several sequences lie in one packed forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.cache import SequenceCache
from forerun.config import MIN_ROWS
from forerun.models.base import Rows
from forerun.models.paths import tree_segments
from forerun.models.segments import Segment, chain_segments


@dataclass(slots=True)
class Layout:
    """One packed forward: what attention must know about its rows. It travels as an argument.

    Attributes:
        num_rows: rows with padding; at least MIN_ROWS.
        writes: (cache, scratch row, start, end): packed rows whose keys and values that cache takes from that row on.
        segments: rows whose attention is computed together; together they cover all rows.
        positions: [num_rows] int64.
        token_ids: [num_rows] int64.
        logit_rows: packed rows whose logits are wanted, padded to MIN_ROWS; None for all rows.
        num_logits: how many of them are real.
        attended: layers whose attention has been computed, filled by the general path.
    """

    num_rows: int
    writes: list[tuple[SequenceCache, int, int, int]]
    segments: list[Segment]
    positions: Tensor
    token_ids: Tensor
    logit_rows: Tensor | None
    num_logits: int
    attended: set[int] = field(default_factory=set)


def lay_out(batch: Sequence[Rows], dtype: torch.dtype) -> Layout:
    """Pack the rows of several sequences. dtype: of the attention scores, and so of the masks."""
    writes: list[tuple[SequenceCache, int, int, int]] = []
    segments: list[Segment] = []
    tokens: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    for rows in batch:
        cache, n, start = _cache_of(rows), len(rows.token_ids), len(tokens)
        first = cache.num_scratch
        if rows.hidden is not None:  # fed already
            first -= n
        elif rows.parents is None:
            cache.feed(range(first - 1, first - 1 + n))
        else:
            cache.feed(rows.parents)
        writes.append((cache, first, start, start + n))
        tokens.extend(rows.token_ids.tolist() if isinstance(rows.token_ids, Tensor) else rows.token_ids)
        if all(parent == row - 1 for row, parent in enumerate(cache.scratch_parents)):
            position = cache.length + first
            positions.extend(range(position, position + n))
            segments.extend(chain_segments(cache, position, start, n, dtype))
        else:
            tree, tree_positions = tree_segments(cache, first, start, dtype)
            positions.extend(tree_positions)
            segments.extend(tree)
        logit_rows.extend(range(start + n - rows.num_wanted, start + n))
    real, num_logits = len(tokens), len(logit_rows)
    padding = MIN_ROWS - real
    if padding > 0:
        tokens.extend(tokens[-1:] * padding)
        positions.extend(positions[-1:] * padding)
        segments[-1].pad(padding)
    rows_total = max(real, MIN_ROWS)
    selected = None
    if num_logits != rows_total and not (num_logits == real and padding > 0):
        logit_rows.extend([rows_total - 1] * (MIN_ROWS - num_logits))
        selected = torch.tensor(logit_rows)
    return Layout(rows_total, writes, segments, torch.tensor(positions), torch.tensor(tokens), selected, num_logits)


def _cache_of(rows: Rows) -> SequenceCache:
    """Models of this package compute in caches that they have made."""
    if not isinstance(rows.cache, SequenceCache):
        raise TypeError(f"rows came with a {type(rows.cache).__name__}, which no model of this kind has made")
    return rows.cache
