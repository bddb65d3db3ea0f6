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

from forerun.cache import SequenceCache
from forerun.config import KV_BLOCK, KV_TAIL, MAX_LANES
from forerun.models.segments import Paths, Segment, tails

Path = list[int]


def tree_segments(cache: SequenceCache, first: int, start: int, dtype: torch.dtype) -> tuple[list[Segment], list[int]]:
    """Segments of the scratch rows from `first` on, the first of which is packed row `start`, and their positions.

    The rows before them were computed by earlier forwards; theirs are keys only.
    """
    paths: list[Path] = []
    for node, parent in enumerate(cache.scratch_parents):
        paths.append([*paths[parent], node] if parent >= 0 else [node])
    length, num_nodes, n = cache.length, len(paths), len(paths) - first
    positions = [length + len(path) - 1 for path in paths]
    new = positions[first:]
    if _fits(length, num_nodes) and length // KV_BLOCK == max(new) // KV_BLOCK:
        where = torch.tensor(positions)
        own = Paths(length, _lanes(paths[first:], num_nodes), where, tails(length + num_nodes + 1))
        return [_segment(cache, start, n, where[first:], own, dtype)], new
    segments = []
    for above, rows in _groups(length, paths, first):
        own = _apart(length, paths, above, rows)
        own.rows = torch.tensor(rows) + (start - first)
        where = torch.tensor([positions[row] for row in rows])
        segments.append(_segment(cache, start, n, where, own, dtype))
    return segments, new


def _segment(cache: SequenceCache, start: int, n: int, positions: Tensor, own: Paths, dtype: torch.dtype) -> Segment:
    lanes_start = own.shared // KV_TAIL * KV_TAIL
    mask = torch.zeros(1, own.num_columns - lanes_start, dtype=dtype)
    mask[0, own.shared + len(own.lane_positions) - lanes_start] = -torch.inf
    num_keys = tails(int(positions.max()) + 1)
    return Segment(cache, start, start + n, mask, num_keys, positions, own)


def _fits(shared: int, num_nodes: int) -> bool:
    """Whether one product may hold the lanes of that many nodes, and what of the last tail they share."""
    return shared % KV_TAIL + num_nodes + 1 <= MAX_LANES


def _lanes(paths: Sequence[Path], num_lanes: int) -> Tensor:
    """[len(paths), longest]; num_lanes is the lane that no row sees."""
    width = max(map(len, paths))
    padded = [path + [num_lanes] * (width - len(path)) for path in paths]
    # four times as fast as torch.tensor of nested lists
    return torch.from_numpy(np.fromiter(chain.from_iterable(padded), np.int64)).view(-1, width)


def _apart(length: int, paths: Sequence[Path], above: Path, rows: Sequence[int]) -> Paths:
    """Paths of rows that share `above` after the prefix, with lanes for the nodes on their ways only."""
    shared = length + len(above)
    below = [paths[row][len(above) :] for row in rows]
    nodes = sorted({node for path in below for node in path})
    lane = {node: i for i, node in enumerate(nodes)}
    num_columns = tails(shared + len(nodes) + 1)
    slots = torch.zeros(num_columns, dtype=torch.int64)
    slots[:length] = torch.arange(length)
    slots[length : shared + len(nodes)] = torch.tensor([*above, *nodes]) + length
    lanes = _lanes([[lane[node] for node in path] for path in below], len(nodes))
    lane_positions = torch.tensor([length + len(paths[node]) - 1 for node in nodes])
    return Paths(shared, lanes, lane_positions, num_columns, slots)


def _groups(length: int, paths: Sequence[Path], first: int) -> Iterator[tuple[Path, list[int]]]:
    """The rows from `first` on by segment, with the nodes that all rows of the segment follow.

    Those are the nodes before the block the rows stand in, whose product has no room for others. A tree too large for
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
            own = set(paths[row][len(above) :])
            if part and not _fits(length + len(above), len(lanes | own)):
                yield list(above), part
                part, lanes = [], set()
            part.append(row)
            lanes |= own
        yield list(above), part
