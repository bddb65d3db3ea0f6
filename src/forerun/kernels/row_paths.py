"""What each row of a forward sees, slot by slot, in the arrays that the native and the Triton kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
