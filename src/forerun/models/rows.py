"""How the new rows of several sequences lie in one packed forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.cache import SequenceCache
from forerun.config import KV_BLOCK, KV_TAIL, MIN_ROWS


@dataclass(frozen=True, slots=True)
class Rows:
    """The new rows of one sequence in one forward.

    Attributes:
        cache: the sequence's cache in this model; row i writes slot cache.length + i.
        token_ids: [n], at least one.
        parents: [n]; the row each row follows, below its own index, -1 for the cached prefix. None: a chain.
        num_logits: logits are returned for this many of the last rows; None for all.
    """

    cache: SequenceCache
    token_ids: Sequence[int]
    parents: Sequence[int] | None = None
    num_logits: int | None = None

    @property
    def is_chain(self) -> bool:
        """Whether every row follows the row before it."""
        return self.parents is None or all(parent == i - 1 for i, parent in enumerate(self.parents))


@dataclass(slots=True)
class Segment:
    """Rows of one sequence whose attention is computed together: all their last keys lie in one block of keys.

    Attributes:
        cache: where the sequence's keys and values are.
        start, end: packed rows.
        mask: additive, [end - start, columns], for the last `columns` of the num_keys keys read; earlier keys are
            visible to every row.
        num_keys: keys read: whole blocks, then as many tails as the rows reach into the last block.
        positions: [end - start] int64.
        is_tree: keys of the new rows stand in the order of the tree's nodes, not of their positions.
    """

    cache: SequenceCache
    start: int
    end: int
    mask: Tensor
    num_keys: int
    positions: Tensor
    is_tree: bool = False
    _prepared: dict[tuple[int, int | None], tuple[Tensor, list[tuple[int, int]]]] = field(default_factory=dict)

    def _spans(self, first: int) -> list[tuple[int, int]]:
        """The partition of the keys from `first` on: what is summed in one product, in order."""
        last_block = (self.num_keys - 1) // KV_BLOCK * KV_BLOCK
        blocks = range(first, last_block, KV_BLOCK)
        tails = range(last_block, self.num_keys, KV_TAIL)
        return [*((start, start + KV_BLOCK) for start in blocks), *((start, start + KV_TAIL) for start in tails)]

    def prepared(self, group: int, window: int | None) -> tuple[Tensor, list[tuple[int, int]]]:
        """The mask over the keys in sight, and their partition; computed once for all layers alike.

        Args:
            group: query heads per key head; the mask has a row for each.
            window: a row at position p sees positions above p - window. Blocks that no row sees are left out:
                they would add exact zeros.

        Returns:
            [1, R, keys] with R = (end - start) * group, repeated up to MIN_ROWS; and the spans of keys that are
            summed in one product each, in order, from the first key in sight to the last.
        """
        key = (group, window)
        if key not in self._prepared:
            first, mask = self._full_mask(window)
            mask = mask.repeat_interleave(group, 0)
            if len(mask) < MIN_ROWS:
                mask = mask.repeat(-(-MIN_ROWS // len(mask)), 1)
            self._prepared[key] = (mask.unsqueeze(0), self._spans(first))
        return self._prepared[key]

    def _full_mask(self, window: int | None) -> tuple[int, Tensor]:
        first = 0
        if window is not None:
            first = max(0, int(self.positions.min()) - window + 1) // KV_BLOCK * KV_BLOCK
        columns = self.num_keys - first
        width = self.mask.shape[-1]
        if width == columns and window is None:
            return first, self.mask
        mask = self.mask.new_zeros(len(self.positions), columns)
        mask[:, max(0, columns - width) :] = self.mask[:, max(0, width - columns) :]
        if window is not None:
            key_positions = torch.arange(first, first + columns)
            if self.is_tree:
                start = self.cache.length - first
                key_positions[start : start + len(self.positions)] = self.positions[: columns - start]
            mask.masked_fill_(key_positions <= self.positions[:, None] - window, -torch.inf)
        return first, mask


@dataclass(slots=True)
class Layout:
    """One packed forward: what attention must know about its rows. It travels as an argument.

    Attributes:
        num_rows: rows with padding; at least MIN_ROWS.
        writes: (cache, start, end): packed rows whose keys and values that cache takes.
        segments: rows whose attention is computed together; together they cover all rows.
        positions: [num_rows] int64.
        token_ids: [num_rows] int64.
        logit_rows: packed rows whose logits are wanted, padded to MIN_ROWS; None for all rows.
        num_logits: how many of them are real.
        attended: layers whose attention has been computed, filled by the general path.
    """

    num_rows: int
    writes: list[tuple[SequenceCache, int, int]]
    segments: list[Segment]
    positions: Tensor
    token_ids: Tensor
    logit_rows: Tensor | None
    num_logits: int
    attended: set[int] = field(default_factory=set)


def lay_out(batch: Sequence[Rows], dtype: torch.dtype) -> Layout:
    """Pack the rows of several sequences. dtype: of the attention scores, and so of the masks."""
    writes: list[tuple[SequenceCache, int, int]] = []
    segments: list[Segment] = []
    tokens: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    for rows in batch:
        n, start = len(rows.token_ids), len(tokens)
        rows.cache.reserve(n)
        writes.append((rows.cache, start, start + n))
        tokens.extend(rows.token_ids)
        if rows.is_chain:
            first = rows.cache.length
            positions.extend(range(first, first + n))
            segments.extend(_chain_segments(rows.cache, start, n, dtype))
        else:
            segment, tree_positions = _tree_segment(rows, start, dtype)
            positions.extend(tree_positions)
            segments.append(segment)
        wanted = n if rows.num_logits is None else rows.num_logits
        logit_rows.extend(range(start + n - wanted, start + n))
    real, num_logits = len(tokens), len(logit_rows)
    padding = MIN_ROWS - real
    if padding > 0:
        tokens.extend(tokens[-1:] * padding)
        positions.extend(positions[-1:] * padding)
        _pad_last(segments[-1], padding)
    rows_total = max(real, MIN_ROWS)
    selected = None
    if num_logits != rows_total and not (num_logits == real and padding > 0):
        logit_rows.extend([rows_total - 1] * (MIN_ROWS - num_logits))
        selected = torch.tensor(logit_rows)
    return Layout(rows_total, writes, segments, torch.tensor(positions), torch.tensor(tokens), selected, num_logits)


_CAUSAL: dict[torch.dtype, Tensor] = {}


def _causal(dtype: torch.dtype) -> Tensor:
    """[KV_BLOCK, KV_BLOCK]: row i sees the first i + 1 keys of a block."""
    if dtype not in _CAUSAL:
        full = torch.full((KV_BLOCK, KV_BLOCK), -torch.inf, dtype=dtype)
        _CAUSAL[dtype] = full.triu_(1)
    return _CAUSAL[dtype]


def _tails(num_keys: int) -> int:
    """num_keys rounded up to whole tails."""
    return -(-num_keys // KV_TAIL) * KV_TAIL


def _chain_segments(cache: SequenceCache, start: int, n: int, dtype: torch.dtype) -> list[Segment]:
    """Cut a chain where it crosses into another block of keys: what a row adds up, and in which order, then
    depends on its own position alone."""
    segments = []
    done = 0
    while done < n:
        position = cache.length + done
        block, offset = divmod(position, KV_BLOCK)
        take = min(n - done, KV_BLOCK - offset)
        columns = _tails(offset + take)
        mask = _causal(dtype)[offset : offset + take, :columns]
        num_keys = block * KV_BLOCK + columns
        positions = torch.arange(position, position + take)
        segments.append(Segment(cache, start + done, start + done + take, mask, num_keys, positions))
        done += take
    return segments


def _tree_segment(rows: Rows, start: int, dtype: torch.dtype) -> tuple[Segment, list[int]]:
    """One segment for a branching tree: each row sees the prefix, its ancestors and itself."""
    assert rows.parents is not None
    length, n = rows.cache.length, len(rows.token_ids)
    num_keys = _tails(length + n)
    first_masked = length // KV_BLOCK * KV_BLOCK
    mask = torch.full((n, num_keys - first_masked), -torch.inf, dtype=dtype)
    mask[:, : length - first_masked] = 0
    depths: list[int] = []
    for i, parent in enumerate(rows.parents):
        if parent >= 0:
            mask[i] = mask[parent]
        mask[i, length - first_masked + i] = 0
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    positions = [length + depth for depth in depths]
    segment = Segment(rows.cache, start, start + n, mask, num_keys, torch.tensor(positions), True)
    return segment, positions


def _pad_last(segment: Segment, padding: int) -> None:
    """Let the padding rows attend as the segment's last row does; nobody reads what they compute."""
    segment.end += padding
    segment.mask = torch.cat([segment.mask, segment.mask[-1:].expand(padding, -1)])
    segment.positions = torch.cat([segment.positions, segment.positions[-1:].expand(padding)])
