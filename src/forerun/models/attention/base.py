"""The contract of attention: one forward described by arrays, and what computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from forerun.kernels.partition import Form, Partition

View = tuple[int, int | None]
"""Query heads per key head, and window: what a layer's masks depend on."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerAttention:
    """The attention of one layer, as its decoder declares it when it is made.

    Attributes:
        num_kv_heads: heads of keys and values.
        group: query heads per key head.
        key_width: of queries and keys. value_width: of values.
    """

    num_kv_heads: int
    group: int
    key_width: int
    value_width: int
    form: Form

    @property
    def view(self) -> View:
        return self.group, self.form.window

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, and widths of keys and values: what a cache holds of each position."""
        return self.num_kv_heads, self.key_width, self.value_width


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Where the keys and values of one sequence lie: here in one run of slots, by position.

    Attributes:
        keys: by layer, [H_kv, slots, D]. values: by layer, [H_kv, slots, D_v].
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Write:
    """Packed rows start..end write their keys and values to slots slot, slot + 1, ... of pages[sequence]."""

    sequence: int
    slot: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Rows of one sequence whose attention is computed together: all their last keys lie in one block of keys.

    Attributes:
        sequence: index into Layout.pages.
        start, end: packed rows.
        rows: [n] int64 packed rows, where they are not those from start to end.
        slots: [columns] int64, the slot of each column of keys that a partition speaks of; None: in order.
        partitions: by view, what the rows see.
    """

    sequence: int
    start: int
    end: int
    rows: Tensor | None
    slots: Tensor | None
    partitions: Mapping[View, Partition]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """One packed forward: arrays on the model's device, and plain numbers.

    Attributes:
        num_rows: rows with padding; at least MIN_ROWS.
        num_new: rows without padding.
        num_positions: one more than the last position.
        token_ids: [num_rows] int64.
        positions: [num_rows] int64.
        logit_rows: packed rows whose logits are wanted, padded to MIN_ROWS; None for all rows.
        num_logits: how many of them are real.
        pages: of each sequence, once for each of its entries in the batch.
        writes: what goes where in them; together all rows without padding.
        segments: rows whose attention is computed together; together they cover all rows.
    """

    num_rows: int
    num_new: int
    num_positions: int
    token_ids: Tensor
    positions: Tensor
    logit_rows: Tensor | None
    num_logits: int
    pages: Sequence[Pages]
    writes: Sequence[Write]
    segments: Sequence[Segment]


class Attention(Protocol):
    """What computes attention. A row's result depends on its own path alone, to the last bit."""

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, layout: Layout, form: Form) -> Tensor:
        """Store the new keys and values, and attend with every row to its own path.

        Args:
            layer: index of the layer in the pages.
            query: [T, H, D]. key: [T, H_kv, D]. value: [T, H_kv, D_v]. All in the pages' dtype.
            form: one that the decoder has declared.

        Returns:
            [T, H * D_v] in the weights' dtype.
        """
