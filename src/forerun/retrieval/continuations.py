"""Continuations as a tree of prefixes with counts: the most frequent ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.tree import ROOT, Tree


@dataclass(frozen=True, slots=True)
class Continuations:
    """Prefixes of continuations.

    Attributes:
        tree: [n] the prefixes, the most frequent first, each after its parent.
        counts: [n] continuations that start with the node's path.
        parent_counts: [n] the same of the node above; at the top, all continuations.
    """

    tree: Tree
    counts: NDArray[np.int64]
    parent_counts: NDArray[np.int64]


def best_nodes(rows: NDArray[np.int64], marker: int, limit: int) -> Continuations:
    """The `limit` most frequent prefixes; of equally frequent ones the shorter, then those in the rows' order.

    Args:
        rows: [m, depth] in lexicographic order, so that equal prefixes stand together; duplicates are counted.
        marker: ends a row.
    """
    m, depth = rows.shape
    if m == 0 or depth == 0 or limit <= 0:
        none = np.zeros(0, dtype=np.int64)
        return Continuations(Tree(), none, none)
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
) -> Continuations:
    """The chosen nodes, in their order, with their parents among them."""
    m = by_depth.shape[1]
    node_at = np.cumsum(new.ravel()) - 1  # the node of every cell
    cells = starts[chosen]
    above = node_at[np.maximum(cells - m, 0)]
    top = cells < m
    place = np.full(len(starts), -1, dtype=np.int64)
    place[chosen] = np.arange(len(chosen))
    tree = Tree(by_depth.ravel()[cells].tolist(), np.where(top, ROOT, place[above]).tolist())
    return Continuations(tree, counts[chosen], np.where(top, m, counts[above]))


def _descending(counts: NDArray[np.intp], most: int) -> NDArray[np.intp]:
    """A stable order, highest first; 16-bit numbers are sorted without comparing them."""
    kind = np.int16 if most < 1 << 15 else np.int64
    return np.argsort((-counts).astype(kind), kind="stable")
