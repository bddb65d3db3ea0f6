"""Segments: rows of one sequence whose attention is computed together, and the partition of the keys they read."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.cache import SequenceCache
from forerun.config import KV_BLOCK, KV_TAIL, MIN_ROWS

Span = tuple[int, int]


@dataclass(slots=True)
class Paths:
    """How the rows of a branching tree find their own paths among the keys.

    The segment's keys are read in columns: first the `shared` positions that all its rows follow, then a lane for each
    node that is on some row's path, parents first, then one that no row sees.

    Attributes:
        shared: positions that all rows follow.
        lanes: [n, deepest path below the shared positions] int64; row i's path, root to leaf, as lanes; beyond its end
            the lane that no row sees.
        lane_positions: [lanes] int64, the position of the node in each.
        num_columns: whole tails.
        slots: [num_columns] int64, where in the cache each column is; None: in the order of the columns.
        rows: [n] int64 packed rows; None: those from the segment's start to its end.
    """

    shared: int
    lanes: Tensor
    lane_positions: Tensor
    num_columns: int
    slots: Tensor | None = None
    rows: Tensor | None = None


@dataclass(slots=True)
class Segment:
    """Rows of one sequence whose attention is computed together: all their last keys lie in one block of keys.

    Attributes:
        cache: where the sequence's keys and values are.
        start, end: packed rows.
        mask: additive, [end - start or 1, columns], for the last `columns` of the keys read; earlier keys are visible
            to every row.
        num_keys: positions reached: whole blocks, then as many tails as the rows reach into the last block.
        positions: [rows] int64.
        paths: of a branching tree; None for a chain, whose keys lie in the order of their positions.
    """

    cache: SequenceCache
    start: int
    end: int
    mask: Tensor
    num_keys: int
    positions: Tensor
    paths: Paths | None = None
    _prepared: dict[tuple[int, int | None], tuple[Tensor, list[Span]]] = field(default_factory=dict)
    _lanes: dict[int, Tensor] = field(default_factory=dict)

    def prepared(self, group: int, window: int | None) -> tuple[Tensor, list[Span]]:
        """The mask over the keys in sight, and their partition; computed once for all layers alike.

        Args:
            group: query heads per key head; the mask has a row for each.
            window: a row at position p sees positions above p - window. Blocks that no row sees are left out:
                they would add exact zeros.

        Returns:
            [1, R or 1, columns] with R = rows * group, repeated up to MIN_ROWS; and the spans of positions that are
            summed in one product each, in order, from the first in sight to the last.
        """
        key = (group, window)
        if key not in self._prepared:
            first, mask = self._full_mask(window)
            if len(mask) > 1:
                mask = _for_each_query(mask, group)
            self._prepared[key] = (mask.unsqueeze(0), self._spans(first))
        return self._prepared[key]

    def prepared_lanes(self, group: int) -> Tensor:
        """`paths.lanes` with a row for each query head, [1, R, deepest path]; computed once for all layers alike."""
        if group not in self._lanes:
            assert self.paths is not None
            self._lanes[group] = _for_each_query(self.paths.lanes, group).unsqueeze(0)
        return self._lanes[group]

    def pad(self, padding: int) -> None:
        """Let this many more packed rows attend as the last one does; nobody reads what they compute."""
        if len(self.mask) > 1:
            self.mask = _repeat_last(self.mask, padding)
        self.positions = _repeat_last(self.positions, padding)
        if self.paths is not None:
            self.paths.lanes = _repeat_last(self.paths.lanes, padding)
            if self.paths.rows is not None:
                self.paths.rows = torch.cat([self.paths.rows, torch.arange(self.end, self.end + padding)])
        self.end += padding

    def _spans(self, first: int) -> list[Span]:
        last_block = (self.num_keys - 1) // KV_BLOCK * KV_BLOCK
        blocks = range(first, last_block, KV_BLOCK)
        tails = range(last_block, self.num_keys, KV_TAIL)
        return [*((start, start + KV_BLOCK) for start in blocks), *((start, start + KV_TAIL) for start in tails)]

    def _full_mask(self, window: int | None) -> tuple[int, Tensor]:
        """The first key in sight, and [rows or 1, columns]."""
        first, paths = 0, self.paths
        if window is not None:
            first = max(0, int(self.positions.min()) - window + 1) // KV_BLOCK * KV_BLOCK
            if paths is not None:
                first = min(first, paths.shared // KV_BLOCK * KV_BLOCK)
        columns = (self.num_keys if paths is None else paths.num_columns) - first
        width = self.mask.shape[-1]
        if width == columns and window is None:
            return first, self.mask
        mask = self.mask.new_zeros(len(self.mask if window is None else self.positions), columns)
        mask[:, max(0, columns - width) :] = self.mask[:, max(0, width - columns) :]
        if window is not None:
            key_positions = torch.arange(first, first + columns)
            if paths is not None:
                start = paths.shared - first
                key_positions[start : start + len(paths.lane_positions)] = paths.lane_positions
            mask.masked_fill_(key_positions <= self.positions[:, None] - window, -torch.inf)
        return first, mask


def tails(num_keys: int) -> int:
    """num_keys rounded up to whole tails."""
    return -(-num_keys // KV_TAIL) * KV_TAIL


def chain_segments(cache: SequenceCache, first: int, start: int, n: int, dtype: torch.dtype) -> list[Segment]:
    """Segments of n rows of a chain from position `first` on, the first of which is packed row `start`.

    A chain is cut where it crosses into another block of keys: what a row adds up, and in which order, then depends
    on its position alone.
    """
    segments = []
    done = 0
    while done < n:
        position = first + done
        block, offset = divmod(position, KV_BLOCK)
        take = min(n - done, KV_BLOCK - offset)
        columns = tails(offset + take)
        mask = _causal(dtype)[offset : offset + take, :columns]
        num_keys = block * KV_BLOCK + columns
        positions = torch.arange(position, position + take)
        segments.append(Segment(cache, start + done, start + done + take, mask, num_keys, positions))
        done += take
    return segments


_CAUSAL: dict[torch.dtype, Tensor] = {}


def _causal(dtype: torch.dtype) -> Tensor:
    """[KV_BLOCK, KV_BLOCK]: row i sees the first i + 1 keys of a block."""
    if dtype not in _CAUSAL:
        full = torch.full((KV_BLOCK, KV_BLOCK), -torch.inf, dtype=dtype)
        _CAUSAL[dtype] = full.triu_(1)
    return _CAUSAL[dtype]


def _for_each_query(rows: Tensor, group: int) -> Tensor:
    """[n, ...] -> [R, ...]: every row `group` times, and all of them repeated up to MIN_ROWS."""
    rows = rows.repeat_interleave(group, 0)
    return rows.repeat(-(-MIN_ROWS // len(rows)), 1) if len(rows) < MIN_ROWS else rows


def _repeat_last(rows: Tensor, times: int) -> Tensor:
    return torch.cat([rows, rows[-1:].expand(times, *rows.shape[1:])])
