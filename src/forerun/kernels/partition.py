"""The partition of the keys that attention adds up, which decides the bits of its sums.

Every reduction over keys is cut in a way fixed by the row's position: whole blocks of KV_BLOCK keys, then the block
the row stands in, KV_TAIL keys at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

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
class Form:
    """What one layer's attention computes.

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
    """num_keys rounded up to whole tails."""
    return -(-num_keys // KV_TAIL) * KV_TAIL


def spans_of(first: int, num_keys: int) -> tuple[Span, ...]:
    """The parts in which columns first..num_keys are added. first: a multiple of KV_BLOCK; num_keys: whole tails."""
    last_block = (num_keys - 1) // KV_BLOCK * KV_BLOCK
    blocks = range(first, last_block, KV_BLOCK)
    tail_starts = range(last_block, num_keys, KV_TAIL)
    return (*((start, start + KV_BLOCK) for start in blocks), *((start, start + KV_TAIL) for start in tail_starts))
