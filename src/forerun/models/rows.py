"""How the new rows of several sequences lie in one packed forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.cache import SequenceCache
from forerun.config import MIN_ROWS
from forerun.models.paths import tree_segments
from forerun.models.segments import Segment, chain_segments


@dataclass(frozen=True, slots=True)
class Rows:
    """The new rows of one sequence in one forward.

    Attributes:
        cache: the sequence's cache in this model; row i writes slot cache.length + i.
        token_ids: [n], at least one.
        parents: [n]; the row each row follows, below its own index, -1 for the cached prefix. None: a chain.
        num_logits: logits are returned for this many of the last rows; None for all.
        hidden: [n, hidden], what enters layer `first_layer` for each of the rows, as Model.forward_first returned it;
            their keys and values of the layers before lie in their slots. None: nothing is computed yet.
        first_layer: the layer to go on from.
    """

    cache: SequenceCache
    token_ids: Sequence[int]
    parents: Sequence[int] | None = None
    num_logits: int | None = None
    hidden: Tensor | None = None
    first_layer: int = 0

    @property
    def is_chain(self) -> bool:
        """Whether every row follows the row before it."""
        return self.parents is None or list(self.parents) == list(range(-1, len(self.token_ids) - 1))


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
        rows.cache.reserve(n + 1)  # a tree reads one slot that no row sees
        writes.append((rows.cache, start, start + n))
        tokens.extend(rows.token_ids)
        if rows.is_chain:
            first = rows.cache.length
            positions.extend(range(first, first + n))
            segments.extend(chain_segments(rows.cache, start, n, dtype))
        else:
            tree, tree_positions = tree_segments(rows.cache, rows.parents or (), start, dtype)
            positions.extend(tree_positions)
            segments.extend(tree)
        wanted = n if rows.num_logits is None else rows.num_logits
        logit_rows.extend(range(start + n - wanted, start + n))
    real, num_logits = len(tokens), len(logit_rows)
    padding = MIN_ROWS - real
    if padding > 0:
        tokens.extend(tokens[-1:] * padding)
        positions.extend(positions[-1:] * padding)
        segments[-1].pad(padding)
    rows_total = max(real, MIN_ROWS)
    selected = None
    if num_logits != rows_total and not (num_logits == real and padding > 0):
        logit_rows.extend([rows_total - 1] * (MIN_ROWS - num_logits))
        selected = torch.tensor(logit_rows)
    return Layout(rows_total, writes, segments, torch.tensor(positions), torch.tensor(tokens), selected, num_logits)
