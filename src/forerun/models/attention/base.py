"""The contract of attention: one forward described by arrays, what computes it, and what prepares it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from forerun.kernels.partition import AttentionShape, PathPlan
from forerun.kv_cache import PagePool, SequenceCache
from forerun.models.attention.segment_plan import SegmentPlan, View
from forerun.types import Cache

Plan = SegmentPlan | PathPlan
"""What a kind of attention reads of a forward: of the PyTorch reference, or of the native kernels."""

Kind = TypeVar("Kind", bound=SequenceCache)


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
    form: AttentionShape

    @property
    def view(self) -> View:
        return self.group, self.form.window

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, and widths of keys and values: what a cache holds of each position."""
        return self.num_kv_heads, self.key_width, self.value_width


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """The rows of one sequence in one forward, when they have joined their cache's scratch.

    Attributes:
        cache: the sequence's.
        start, end: packed rows.
        first: scratch row of the first.
        positions: [end - start].
        is_chain: whether all of the scratch is a chain.
        is_block: the rows see each other, and all positions before them.
    """

    cache: SequenceCache
    start: int
    end: int
    first: int
    positions: Sequence[int]
    is_chain: bool
    is_block: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """One packed forward: arrays on the model's device, and plain numbers.

    Attributes:
        num_rows: rows with padding; at least `Planner.min_rows`.
        num_new: rows without padding.
        num_positions: one more than the last position.
        token_ids: [num_rows] int64.
        positions: [num_rows] int64.
        logit_rows: packed rows whose logits are wanted, padded to `Planner.min_rows`; None for all rows.
        num_logits: how many of them are real.
        hidden_output_rows: packed rows whose hidden states are wanted; None for all rows without padding.
        states: [num_rows, S] what a head reads beside the tokens; of other models None.
        plan: what the rows write and see, from the planner of the attention that computes them.
    """

    num_rows: int
    num_new: int
    num_positions: int
    token_ids: Tensor
    positions: Tensor
    logit_rows: Tensor | None
    num_logits: int
    plan: Plan
    hidden_output_rows: Tensor | None = None
    states: Tensor | None = None

    def wanted(self, x: Tensor) -> Tensor:
        """Of all rows, [T, ...], those whose logits are wanted, perhaps padded; none where no logits are."""
        if self.num_logits == 0:
            return x[:0]
        return x if self.logit_rows is None else x[self.logit_rows]

    def tapped(self, x: Tensor) -> Tensor:
        """Of all rows, [T, ...], those whose hidden states are wanted."""
        return x[: self.num_new] if self.hidden_output_rows is None else x[self.hidden_output_rows]


class Planner(Protocol):
    """What one kind of attention needs of a model's forwards: caches of its kind, and plans.

    Attributes:
        min_rows: a forward of fewer rows is padded with rows like the last one, whose result nobody reads.
        device: where the model computes.
    """

    @property
    def min_rows(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def pool(self) -> PagePool:
        """Where the pages of its caches come from."""

    def new_cache(self) -> SequenceCache:
        """An empty cache for one sequence."""

    def plan(self, batch: Sequence[PackedRows], padding: int) -> Plan:
        """What the rows write and see.

        Args:
            batch: by sequence, in packed order.
            padding: packed rows after them.

        Raises:
            TypeError: a cache was not made by a planner of this kind.
        """


class Attention(Protocol):
    """What computes attention. A row's result depends on its own path alone, to the last bit."""

    def planner(self, layers: Sequence[LayerAttention], device: torch.device) -> Planner:
        """What prepares the forwards of a model with these layers, whose plans `forward` reads."""

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, layout: Layout, form: AttentionShape
    ) -> Tensor:
        """Store the new keys and values, and attend with every row to its own path.

        Args:
            layer: index of the layer in the caches.
            query: [T, H, D]. key: [T, H_kv, D]. value: [T, H_kv, D_v]. All in float32, or float64 for a float64 model.
            form: one that the decoder has declared.

        Returns:
            [T, H * D_v] in the weights' dtype.
        """


def cache_of(kind: type[Kind], cache: Cache) -> Kind:
    """The cache, as one of this kind: models of this package compute in caches that they have made.

    Raises:
        TypeError: it is of another kind.
    """
    if not isinstance(cache, kind):
        raise TypeError(f"rows came with a {type(cache).__name__}, which no model of this kind has made")
    return cache
