"""The partition of the keys that attention adds up, which decides the bits of its sums.

Every reduction over keys is cut in a way fixed by the row's position: whole blocks of KV_BLOCK keys, then the block
the row stands in, KV_TAIL keys at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

KV_BLOCK = 256
"""Keys per attention block: the partition of every reduction over keys is fixed by position in these blocks."""
KV_TAIL = 64
"""Keys per partial sum inside the block a row stands in."""
MIN_ROWS = 4
"""Rows every matrix product is padded to: fewer take another kernel, with other last bits."""
MAX_LANES = 192
"""Keys in one product up to which keys of weight zero may stand anywhere among the others: more are added in parts."""

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionShape:
    """The parameters of one layer's attention.

    Attributes:
        scale: factor of the scores.
        window: a row at position p sees positions above p - window; None: all.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: [H] extra logit per head that takes probability and gives nothing.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """Which keys some rows of one sequence see, and in which parts they are added.

    Keys are read in columns. A chain's columns are positions. Of a tree, the first `shared` columns are the positions
    that all rows follow; then comes a lane for each node on some row's path, parents first, and one that no row sees.

    Attributes:
        mask: [1, R or 1, columns] additive, over the columns from the first in sight; R = rows * query heads per key
            head, repeated up to MIN_ROWS.
        spans: columns that are added in one product each, in order, from the first in sight to the last.
        shared: columns before the lanes; only read with lanes.
        lanes: [1, R, deepest path below the shared columns] int64; each row's path, root to leaf, as lanes; beyond its
            end the lane that no row sees. None for a chain.
    """

    mask: Tensor
    spans: tuple[Span, ...]
    shared: int = 0
    lanes: Tensor | None = None


def tails(num_keys: int) -> int:
    """Round num_keys up to whole tails."""
    return -(-num_keys // KV_TAIL) * KV_TAIL


def spans_of(first: int, num_keys: int) -> tuple[Span, ...]:
    """Return the parts in which columns first..num_keys are added. first: a multiple of KV_BLOCK; num_keys: whole
    tails."""
    last_block = (num_keys - 1) // KV_BLOCK * KV_BLOCK
    blocks = range(first, last_block, KV_BLOCK)
    tail_starts = range(last_block, num_keys, KV_TAIL)
    return (*((start, start + KV_BLOCK) for start in blocks), *((start, start + KV_TAIL) for start in tail_starts))


# What each row of a forward sees, slot by slot, in the arrays that the native and the Triton kernels read.

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class RowPaths:
    """The path of every packed row: the slots whose keys it sees, in the order of positions, its own slot last.

    They are slots 0, 1, ... prefix - 1 and then tail[tail_start[row]:tail_start[row + 1]]. A row of a chain has
    prefix = slot + 1 and no tail. The i-th slot of a path holds position i. All arrays are C-contiguous int32.

    Attributes:
        sequence: [rows] index of the row's sequence in the batch.
        position: [rows].
        slot: [rows], where the row's key and value are written.
        prefix: [rows].
        tail_start: [rows + 1].
        tail: [tail_start[rows]].
    """

    sequence: Ints
    position: Ints
    slot: Ints
    prefix: Ints
    tail_start: Ints
    tail: Ints


@dataclass(frozen=True, slots=True, eq=False)
class PathPlan:
    """Paths, and the pages in which their slots lie.

    Attributes:
        pages: [pages of all sequences] uint64, addresses; the caches of the forward keep them alive.
        page_start: [sequences + 1] int32: slot s lies in pages[page_start[sequence] + s // PAGE].
    """

    paths: RowPaths
    pages: NDArray[np.uint64]
    page_start: Ints
