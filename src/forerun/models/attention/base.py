"""The interface of attention: the layout of one forward, the planner that prepares it, and the attention itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from forerun.kernels.partition import AttentionShape, PathPlan
from forerun.kv_cache import PagePool, SequenceCache
from forerun.kv_cache.recurrent_state import StateMaker
from forerun.types import Cache

if TYPE_CHECKING:
    from forerun.models.attention.segment_plan import SegmentPlan

View = tuple[int, int | None]
"""Query heads per key head, and window: what a layer's masks depend on."""
Plan: TypeAlias = "SegmentPlan | PathPlan"
"""The plan of a forward: of the PyTorch reference, or of the native and Triton kernels."""

ATTENTION_NAME = "forerun"
"""The name by which Transformers' modules find forerun's attention (`models/general.py`)."""
Kind = TypeVar("Kind", bound=SequenceCache)


@dataclass(frozen=True, slots=True, eq=False)
class LayerAttention:
    """The attention of one layer, as its decoder declares it.

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
        """Return the key heads and the widths of a key and a value, which determine a layer's cache."""
        return self.num_kv_heads, self.key_width, self.value_width


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """The rows of one sequence in one forward, after they joined their cache's scratch.

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
        logit_rows: packed rows whose logits are computed, padded to `Planner.min_rows`; None for all rows.
        num_logits: how many of them are real.
        hidden_output_rows: packed rows whose hidden states are returned; None for all rows without padding.
        states: [num_rows, S] what a draft head reads beside the tokens; None for other models.
        plan: what the rows write and see, from the planner of the attention that computes them.
        packed: the rows by sequence.
    """

    num_rows: int
    num_new: int
    num_positions: int
    token_ids: Tensor
    positions: Tensor
    logit_rows: Tensor | None
    num_logits: int
    plan: Plan
    packed: Sequence[PackedRows] = ()
    hidden_output_rows: Tensor | None = None
    states: Tensor | None = None

    def select_logit_rows(self, x: Tensor) -> Tensor:
        """Select the rows whose logits are computed, perhaps padded, from all rows, [T, ...]; none if no logits are."""
        if self.num_logits == 0:
            return x[:0]
        return x if self.logit_rows is None else x[self.logit_rows]

    def select_hidden_rows(self, x: Tensor) -> Tensor:
        """Select the rows whose hidden states are returned from all rows, [T, ...]."""
        return x[: self.num_new] if self.hidden_output_rows is None else x[self.hidden_output_rows]


class Planner(Protocol):
    """Makes the caches of one kind of attention, and the plans of its forwards.

    Attributes:
        min_rows: a forward of fewer rows is padded with rows like the last one, whose result is not read.
        device: where the model computes.
    """

    @property
    def min_rows(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def pool(self) -> PagePool:
        """Return the pool of its caches' pages."""

    new_state: StateMaker | None
    """Makes what recurrent layers keep of a sequence; None: no layer is recurrent."""

    def new_cache(self) -> SequenceCache:
        """Return an empty cache for one sequence."""

    def plan(self, batch: Sequence[PackedRows], padding: int) -> Plan:
        """Return what the rows write and see.

        Args:
            batch: by sequence, in packed order.
            padding: packed rows after them.

        Raises:
            TypeError: a cache was not made by a planner of this kind.
        """


class AttentionBackend(Protocol):
    """Computes attention. A row's result depends on its own path alone, to the last bit."""

    def planner(self, layers: Sequence[LayerAttention], device: torch.device) -> Planner:
        """Return the planner for a model with these layers, whose plans `forward` reads."""

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
    """Return the cache after checking its type: models compute only in caches that they made.

    Raises:
        TypeError: it is of another kind.
    """
    if not isinstance(cache, kind):
        raise TypeError(f"rows came with a {type(cache).__name__}, which no model of this kind has made")
    return cache
