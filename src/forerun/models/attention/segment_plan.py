"""The plan of the PyTorch reference: which rows are computed together, and over which parts of the keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from forerun.kernels.partition import Partition

View = tuple[int, int | None]
"""Query heads per key head, and window: what a layer's masks depend on."""


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
