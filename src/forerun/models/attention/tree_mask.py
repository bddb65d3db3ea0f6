"""Segments of a branching tree, cut so that each row adds up over its own path what a chain of that path adds up.

A product adds its keys one after another, so keys of weight zero may stand anywhere among those of a path, as long as
there are no more than MAX_LANES in all. What has to be as in the chain is which keys go into one product. So the rows
of one segment share all whole blocks of keys; in the last block, the weights of each row's path are spread over the
lanes of the tree's nodes, one tail of positions at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from forerun.kernels.partition import KV_BLOCK, KV_TAIL, MAX_LANES, Partition, tails
from forerun.models.attention.base import View
from forerun.models.attention.segment_plan import Segment, TreeColumns, Views
from forerun.utils.tree import Tree

Path = list[int]


def tree_segments(
    sequence: int, length: int, parents: list[int], first: int, start: int, padding: int, views: Views
) -> list[Segment]:
    """Return the segments of the nodes from `first` on, the first of which is packed row `start`.

    The nodes before them were computed by earlier forwards; theirs are keys only.

    Args:
        length: positions before the tree. parents: of all nodes.
        padding: packed rows after these that attend as the last one does; their results are not read.
    """
    paths = Tree(parents=parents).paths()
    num_nodes = len(paths)
    n = len(paths) - first
    positions = [length + len(path) - 1 for path in paths]
    new = positions[first:]
    if _fits(length, num_nodes) and length // KV_BLOCK == max(new) // KV_BLOCK:
        lanes = _lanes([*paths[first:], *paths[-1:] * padding], num_nodes)
        columns = TreeColumns(length, lanes, positions, tails(length + num_nodes + 1))
        partitions = _partitions(columns, [*new, *new[-1:] * padding], views)
        return [Segment(sequence, start, start + n + padding, None, None, partitions)]
    segments = []
    groups = list(_groups(length, paths, first))
    for i, (above, nodes) in enumerate(groups):
        more = padding if i == len(groups) - 1 else 0
        padded = [*nodes, *nodes[-1:] * more]
        columns, slots = _apart(length, paths, above, padded)
        rows = torch.tensor([*(node + start - first for node in nodes), *range(start + n, start + n + more)])
        rows = rows.to(views.device, non_blocking=True)
        slots = slots.to(views.device, non_blocking=True)
        partitions = _partitions(columns, [positions[node] for node in padded], views)
        segments.append(Segment(sequence, start, start + n + more, rows, slots, partitions))
    return segments


def _partitions(columns: TreeColumns, positions: list[int], views: Views) -> dict[View, Partition]:
    lanes_start = columns.shared // KV_TAIL * KV_TAIL
    mask = torch.zeros(1, columns.num_columns - lanes_start, dtype=views.dtype)
    mask[0, columns.shared + len(columns.lane_positions) - lanes_start] = -torch.inf
    return views.partitions(mask, tails(max(positions) + 1), positions, columns)


def _fits(shared: int, num_nodes: int) -> bool:
    """Return whether one product may hold the lanes of that many nodes, and the shared part of the last tail."""
    return shared % KV_TAIL + num_nodes + 1 <= MAX_LANES


def _lanes(paths: Sequence[Path], num_lanes: int) -> Tensor:
    """Return the paths as lanes, [len(paths), longest], padded with num_lanes, the lane that no row sees."""
    width = max(map(len, paths))
    padded = [path + [num_lanes] * (width - len(path)) for path in paths]
    # four times as fast as torch.tensor of nested lists
    return torch.from_numpy(np.fromiter(chain.from_iterable(padded), np.int64)).view(-1, width)


def _apart(length: int, paths: Sequence[Path], above: Path, rows: Sequence[int]) -> tuple[TreeColumns, Tensor]:
    """Return the columns for rows that share `above` after the prefix, with lanes for the nodes on their paths only,
    and the slot of each column."""
    shared = length + len(above)
    below = [paths[row][len(above) :] for row in rows]
    nodes = sorted({node for path in below for node in path})
    lane = {node: i for i, node in enumerate(nodes)}
    num_columns = tails(shared + len(nodes) + 1)
    slots = torch.zeros(num_columns, dtype=torch.int64)
    slots[:length] = torch.arange(length)
    slots[length : shared + len(nodes)] = torch.tensor([*above, *nodes]) + length
    lanes = _lanes([[lane[node] for node in path] for path in below], len(nodes))
    return TreeColumns(shared, lanes, [length + len(paths[node]) - 1 for node in nodes], num_columns), slots


def _groups(length: int, paths: Sequence[Path], first: int) -> Iterator[tuple[Path, list[int]]]:
    """Yield the nodes from `first` on by segment, with the nodes that all rows of the segment follow.

    Those are the nodes before the block the rows stand in, whose product cannot hold others. A tree too large for
    one product is cut at tails instead, and then as needed.
    """
    unit = KV_BLOCK if _fits(length, len(paths)) else KV_TAIL
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, path in enumerate(paths[first:], first):
        border = (length + len(path) - 1) // unit * unit
        groups.setdefault(tuple(path[: max(0, border - length)]), []).append(row)
    for above, rows in groups.items():
        part: list[int] = []
        lanes: set[int] = set()
        for row in sorted(rows, key=paths.__getitem__):
            needed = set(paths[row][len(above) :])
            if part and not _fits(length + len(above), len(lanes | needed)):
                yield list(above), part
                part = []
                lanes = set()
            part.append(row)
            lanes |= needed
        yield list(above), part
