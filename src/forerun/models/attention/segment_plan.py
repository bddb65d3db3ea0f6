"""The plan of the PyTorch reference: which rows are computed together, their masks, and the parts of the keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.partition import KV_BLOCK, MIN_ROWS, Partition, spans_of
from forerun.models.attention.base import View


@dataclass(frozen=True, slots=True, eq=False)
class StoredKeys:
    """The keys and values of one sequence, in slots ordered by position.

    Attributes:
        keys: by layer, [H_kv, slots, D]. values: by layer, [H_kv, slots, D_v].
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Write:
    """Packed rows start..end write their keys and values to slots slot, slot + 1, ... of stored[sequence]."""

    sequence: int
    slot: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Rows of one sequence whose attention is computed together: all their last keys lie in one block of keys.

    Attributes:
        sequence: index into SegmentPlan.stored.
        start, end: packed rows.
        rows: [n] int64 packed rows, where they are not those from start to end.
        slots: [columns] int64, the slot of each column of keys that a partition speaks of; None: in order.
        partitions: by view, what the rows see.
    """

    sequence: int
    start: int
    end: int
    rows: Tensor | None
    slots: Tensor | None
    partitions: Mapping[View, Partition]


@dataclass(frozen=True, slots=True, eq=False)
class SegmentPlan:
    """What the rows of one forward write and see.

    Attributes:
        stored: of each sequence, once for each of its entries in the batch.
        writes: what goes where in them; together all rows without padding.
        segments: rows whose attention is computed together; together they cover all rows.
    """

    stored: Sequence[StoredKeys]
    writes: Sequence[Write]
    segments: Sequence[Segment]


@dataclass(frozen=True, slots=True, eq=False)
class TreeColumns:
    """How the rows of a branching tree find their own paths among the columns of keys (`Partition`).

    Attributes:
        shared: positions that all rows follow.
        lanes: [n, deepest path below the shared positions] int64.
        lane_positions: of the node in each lane.
        num_columns: whole tails.
    """

    shared: int
    lanes: Tensor
    lane_positions: Sequence[int]
    num_columns: int


@dataclass(frozen=True, slots=True)
class Views:
    """The views of one model.

    Attributes:
        views: as its layers declare them.
        dtype: of the attention scores, and so of the masks.
        device: where the model computes. Masks are made in the CPU's memory and moved there once.
    """

    views: Sequence[View]
    dtype: torch.dtype
    device: torch.device

    def partitions(
        self, mask: Tensor, num_keys: int, positions: Sequence[int], tree: TreeColumns | None = None
    ) -> dict[View, Partition]:
        """Return what rows see, by view.

        Args:
            mask: [rows or 1, columns] additive, for the last `columns` of the keys read; earlier ones are visible to
                every row.
            num_keys: positions reached: whole blocks, then as many tails as the rows reach into the last block.
            positions: of the rows.
            tree: of a branching tree; None for a chain.
        """
        lanes = {} if tree is None else {group: self._repeated(tree.lanes, group) for group, _ in self.views}
        shared = 0 if tree is None else tree.shared
        partitions = {}
        for group, window in self.views:
            first, seen = _seen(mask, num_keys, positions, tree, window)
            moved = self._repeated(seen, group) if len(seen) > 1 else self._moved(seen)
            partitions[group, window] = Partition(moved, spans_of(first, num_keys), shared, lanes.get(group))
        return partitions

    def _repeated(self, rows: Tensor, group: int) -> Tensor:
        """Repeat every row `group` times, and all of them up to MIN_ROWS. [n, ...] -> [1, R, ...]."""
        rows = rows.repeat_interleave(group, 0)
        return self._moved(rows.repeat(-(-MIN_ROWS // len(rows)), 1) if len(rows) < MIN_ROWS else rows)

    def _moved(self, rows: Tensor) -> Tensor:
        return rows.unsqueeze(0).to(self.device, non_blocking=True)


def _seen(
    mask: Tensor, num_keys: int, positions: Sequence[int], tree: TreeColumns | None, window: int | None
) -> tuple[int, Tensor]:
    """Return the first visible column, and the mask from there on, [rows or 1, columns].

    Blocks that no row sees through the window are left out: they would add exact zeros.
    """
    first = 0
    if window is not None:
        first = max(0, min(positions) - window + 1) // KV_BLOCK * KV_BLOCK
        if tree is not None:
            first = min(first, tree.shared // KV_BLOCK * KV_BLOCK)
    columns = (num_keys if tree is None else tree.num_columns) - first
    width = mask.shape[-1]
    if width == columns and window is None:
        return first, mask
    full = mask.new_zeros(len(mask) if window is None else len(positions), columns)
    full[:, max(0, columns - width) :] = mask[:, max(0, width - columns) :]
    if window is not None:
        key_positions = torch.arange(first, first + columns)
        if tree is not None:
            start = tree.shared - first
            key_positions[start : start + len(tree.lane_positions)] = torch.tensor(tree.lane_positions)
        full.masked_fill_(key_positions <= torch.tensor(positions)[:, None] - window, -torch.inf)
    return first, full


def repeat_last(rows: Tensor, times: int) -> Tensor:
    """Append the last row `times` times."""
    return torch.cat([rows, rows[-1:].expand(times, *rows.shape[1:])]) if times else rows
