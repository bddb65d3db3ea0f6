"""The integer arrays that the Triton kernels read of one forward, in one run of memory.

It is written on the host and copied to the device at once, to an address that captured graphs have recorded. A forward
of more rows than the largest bucket, or of more work than the capacity, is cut into pieces.

Words, int64:
    header   HEADER words: how many work items there are, and where the four parts after the rows begin;
    rows     field after field, MAX_ROWS words each (`ROW_FIELDS`): fields lie at the same words for every bucket;
    tiles    TILE_WORDS each: consecutive rows of one sequence whose attention is computed together;
    items    two words each, tile and split: the keys at positions SPLIT * split to SPLIT * (split + 1) for one tile;
    tails    slots, row by row (`RowPaths.tail`);
    pages    sequence by sequence, where pages begin: lines of LINE bytes from one page that always lies there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forerun.kernels.cpu.page_layout import PAGE
from forerun.kernels.partition import PathPlan

MAX_ROWS = 256
"""Rows of the largest bucket: a chunk of a prompt."""
BUCKETS = (16, 32, 64, 128, MAX_ROWS)
"""Rows that a forward is padded to."""
HEAD_ROWS = 64
"""Rows whose logits are computed together at most; a bucket."""
SPLIT = 256
"""Keys whose attention is one partial result. It follows neither the batch nor the context, which would change bits."""
TILE = 16
"""Rows of a tile's products, a row for each of its query heads: the least that tensor cores multiply."""
LINE = 256
"""Bytes: pages begin at multiples of it, so that whole vectors can be read."""
HEADER = 8
ROW_FIELDS = ("token", "position", "page", "slot", "tile", "prefix", "tail")
"""Token id; position; the page to write to, in lines; the slot in it; the row's tile, or NO_TILE of a dead row; the
slots that its path begins with; where the rest of the path begins among the tails."""
TILE_WORDS = 6
"""First row, number of rows, first page, positions up to which all rows have the same slots, first item, the largest
path's length."""
NO_TILE = -1
_EVERYWHERE = 1 << 40
"""Of a chain, up to where slots are the same in all rows: position i lies in slot i."""
Words = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most work that one piece of a forward may need.

    Attributes:
        items: work items. words: of all parts.
    """

    items: int
    words: int

    @classmethod
    def of(cls, context_length: int, tile_rows: int) -> Capacity:
        """Return the capacity for the smallest bucket at the end of the context, if its rows are of one sequence."""
        items = max(1024, -(-BUCKETS[0] // tile_rows) * -(-context_length // SPLIT))
        pages = max(1 << 14, 2 * -(-context_length // PAGE))
        return cls(items, HEADER + len(ROW_FIELDS) * MAX_ROWS + TILE_WORDS * MAX_ROWS + 2 * items + pages)


@dataclass(frozen=True, slots=True)
class Tile:
    """Consecutive rows of one sequence whose attention is computed together.

    Attributes:
        first, end: rows of the forward.
        sequence: index.
        length: of the longest path.
        shared: positions up to which all rows have the same slots.
    """

    first: int
    end: int
    sequence: int
    length: int
    shared: int

    @property
    def splits(self) -> int:
        return -(-self.length // SPLIT)


def bucket_of(num_rows: int) -> int:
    """Return the least bucket that holds so many rows."""
    return next(bucket for bucket in BUCKETS if num_rows <= bucket)


def row_start(field: str) -> int:
    """Return the word at which a row field begins."""
    return HEADER + ROW_FIELDS.index(field) * MAX_ROWS


def pieces(plan: PathPlan, tile_rows: int, capacity: Capacity) -> Iterator[list[Tile]]:
    """Yield a forward's tiles in pieces that fit.

    Args:
        tile_rows: rows of a tile at most.
    """
    piece: list[Tile] = []
    items = words = 0
    fixed = HEADER + len(ROW_FIELDS) * MAX_ROWS
    for tile in _tiles(plan, tile_rows):
        needed = TILE_WORDS + 2 * tile.splits + int(plan.paths.tail_start[tile.end] - plan.paths.tail_start[tile.first])
        if not piece or piece[-1].sequence != tile.sequence:
            needed += int(plan.page_start[tile.sequence + 1] - plan.page_start[tile.sequence])
        is_full = items + tile.splits > capacity.items or fixed + words + needed > capacity.words
        if piece and (is_full or tile.end - piece[0].first > MAX_ROWS):
            yield piece
            piece = []
            items = 0
            words = 0
            needed += int(plan.page_start[tile.sequence + 1] - plan.page_start[tile.sequence])
        piece.append(tile)
        items = items + tile.splits
        words = words + needed
    yield piece


def write_piece(words: Words, plan: PathPlan, tiles: Sequence[Tile], token_ids: Words | None, base: int) -> int:
    """Write one piece's words.

    Args:
        words: [Capacity.words], whatever it holds.
        token_ids: of all rows of the forward; None: they are written on the device.
        base: address of the page that distances are counted from.

    Returns:
        How many words, from the first, are to be copied.
    """
    paths = plan.paths
    first = tiles[0].first
    end = tiles[-1].end
    first_page = plan.page_start[tiles[0].sequence]
    end_page = plan.page_start[tiles[-1].sequence + 1]
    # addresses below the base give a difference that wraps around, and is negative as a signed number
    lines = (plan.pages[first_page:end_page] - np.uint64(base)).view(np.int64) // LINE
    page_start = plan.page_start.astype(np.int64) - first_page
    rows = slice(first, end)
    fields = {name: words[row_start(name) :][:MAX_ROWS] for name in ROW_FIELDS}
    for name, field in fields.items():
        field[:] = NO_TILE if name == "tile" else 0
    count = end - first
    if token_ids is not None:
        fields["token"][:count] = token_ids[rows]
    slots = paths.slot[rows]
    fields["position"][:count] = paths.position[rows]
    fields["page"][:count] = lines[page_start[paths.sequence[rows]] + slots // PAGE]
    fields["slot"][:count] = slots % PAGE
    fields["prefix"][:count] = paths.prefix[rows]
    fields["tail"][:count] = paths.tail_start[rows] - paths.tail_start[first]
    items: list[int] = []
    numbers: list[int] = []
    for index, tile in enumerate(tiles):
        fields["tile"][tile.first - first : tile.end - first] = index
        page = int(page_start[tile.sequence])
        numbers += (tile.first - first, tile.end - tile.first, page, tile.shared, len(items) // 2, tile.length)
        for split in range(tile.splits):
            items += (index, split)
    tails = paths.tail[paths.tail_start[first] : paths.tail_start[end]]
    return _write_parts(words, numbers, items, tails, lines)


def _write_parts(words: Words, *parts: Sequence[int] | NDArray[np.signedinteger]) -> int:
    """Write the parts after the rows, and the header with their starts. parts: tiles, items, tails, pages."""
    start = HEADER + len(ROW_FIELDS) * MAX_ROWS
    words[0] = len(parts[1]) // 2
    for index, part in enumerate(parts, 1):
        words[index] = start
        words[start : start + len(part)] = part
        start += len(part)
    return start


def _tiles(plan: PathPlan, tile_rows: int) -> Iterator[Tile]:
    paths = plan.paths
    sequences = paths.sequence.tolist()
    positions = paths.position.tolist()
    prefixes = paths.prefix.tolist()
    tail_start = paths.tail_start.tolist()
    first = 0
    num_rows = len(sequences)
    while first < num_rows:
        end = first + 1
        while end < min(num_rows, first + tile_rows) and sequences[end] == sequences[first]:
            end += 1
        is_chain = tail_start[first] == tail_start[end]
        shared = _EVERYWHERE if is_chain else min(prefixes[first:end]) // PAGE * PAGE
        yield Tile(first, end, sequences[first], max(positions[first:end]) + 1, shared)
        first = end
