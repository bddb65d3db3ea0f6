"""Continuations as a tree of prefixes with counts, and the part of it that is worth most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Trie:
    """Prefixes of continuations, the most frequent first, each after its parent.

    Attributes:
        token_ids: [n].
        parents: [n] index of the node above, -1 at the top.
        counts: [n] continuations that start with the node's path.
        parent_counts: [n] the same of the node above; at the top, all continuations.
    """

    token_ids: NDArray[np.int64]
    parents: NDArray[np.int64]
    counts: NDArray[np.int64]
    parent_counts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.token_ids)


def best_nodes(rows: NDArray[np.int64], marker: int, limit: int) -> Trie:
    """The `limit` most frequent prefixes; of equally frequent ones the shorter, then those in the rows' order.

    Args:
        rows: [m, depth] in lexicographic order, so that equal prefixes stand together; duplicates are counted.
        marker: ends a row.
    """
    m, depth = rows.shape
    if m == 0 or depth == 0 or limit <= 0:
        none = np.zeros(0, dtype=np.int64)
        return Trie(none, none, none, none)
    by_depth = rows.T
    new = np.ones((depth, m), dtype=bool)  # where a prefix stands for the first time
    np.logical_or.accumulate(by_depth[:, 1:] != by_depth[:, :-1], axis=0, out=new[:, 1:])
    inside = np.logical_and.accumulate(by_depth != marker, axis=0)
    starts = np.flatnonzero(new)  # the first row of every depth is new: runs do not cross depths
    counts = np.diff(starts, append=new.size)
    wanted = np.flatnonzero(inside.ravel()[starts])
    chosen = wanted[_descending(counts[wanted], m)[:limit]]
    return _gathered(by_depth, new, starts, counts, chosen)


def _gathered(
    by_depth: NDArray[np.int64], new: NDArray[Any], starts: NDArray[Any], counts: NDArray[Any], chosen: NDArray[Any]
) -> Trie:
    """The chosen nodes, in their order, with their parents among them."""
    m = by_depth.shape[1]
    node_at = np.cumsum(new.ravel()) - 1  # the node of every cell
    cells = starts[chosen]
    above = node_at[np.maximum(cells - m, 0)]
    top = cells < m
    place = np.full(len(starts), -1, dtype=np.int64)
    place[chosen] = np.arange(len(chosen))
    return Trie(
        by_depth.ravel()[cells], np.where(top, -1, place[above]), counts[chosen], np.where(top, m, counts[above])
    )


def _descending(counts: NDArray[np.intp], most: int) -> NDArray[np.intp]:
    """A stable order, highest first; 16-bit numbers are sorted without comparing them."""
    kind = np.int16 if most < 1 << 15 else np.int64
    return np.argsort((-counts).astype(kind), kind="stable")
