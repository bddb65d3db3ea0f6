"""The state that all caches of one sequence share: which slots hold which positions. Subclasses place the slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from forerun.kernels.cpu.page_layout import PAGE
from forerun.kv_cache.page_pool import PagePool
from forerun.kv_cache.prefix_tree import Page
from forerun.kv_cache.recurrent_state import RecurrentState, Saved
from forerun.types import Cache

_MOST_MARKS = 4
"""Of a sequence: the last ones, of which the last border of a page in a prompt is one."""


class SequenceCache(ABC):
    """Keys and values of one sequence, for every layer of one model (`types.Cache`).

    Position p lies in slot p. `feed` adds a forward's rows to the scratch, which lies in the slots beyond `length` in
    the order in which it was fed; the forward writes their keys and values there; they become part of the sequence only
    by `commit`. Whatever lies beyond `length` is finite, unless a forward wrote other numbers there.

    Attributes:
        shapes: by layer, (H_kv, D, D_v).
        dtype: of the keys and values.
        length: committed positions.
        scratch_parents: of each scratch row, the scratch row that it follows; -1 for the last position.
        held: pages of the pool, in order.
        state: what recurrent layers keep; None: no layer is recurrent.
        marks: states that were kept, by the committed positions before them.

    Args:
        pool: where pages come from, and go when they are given back.
        shapes: by layer with keys and values, (H_kv, D, D_v).
    """

    def __init__(
        self,
        pool: PagePool,
        shapes: Sequence[tuple[int, int, int]],
        dtype: torch.dtype,
        state: RecurrentState | None = None,
    ) -> None:
        self.pool = pool
        self.shapes = shapes
        self.dtype = dtype
        self.length = 0
        self.scratch_parents: list[int] = []
        self.held: list[Page] = []
        self.state = state
        self.marks: dict[int, Saved] = {}
        self._num_published = 0  # whole pages from the start
        pool.register(self)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Return the bytes held."""

    @property
    def num_scratch(self) -> int:
        """Return the number of rows fed since the last commit."""
        return len(self.scratch_parents)

    @property
    def _state_nbytes(self) -> int:
        return 0 if self.state is None else self.state.nbytes

    def feed(self, parents: Sequence[int]) -> None:
        """Add rows to the scratch, and reserve slots for them.

        Args:
            parents: of each new row, the scratch row that it follows, below its own index; -1 for the last position.

        Raises:
            ValueError: a parent is not there.
            OutOfPagesError: the pool has too few pages.
        """
        first = len(self.scratch_parents)
        for row, parent in enumerate(parents, first):
            if not -1 <= parent < row:
                raise ValueError(f"row {row} of the scratch cannot follow row {parent}")
        self._reserve(self.length + first + len(parents))
        self.scratch_parents += parents

    @abstractmethod
    def write(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values of one layer for scratch rows `row`, `row + 1`, ..., which have been fed.

        Args:
            keys: [H_kv, n, D]. values: [H_kv, n, D_v].
        """

    @abstractmethod
    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys [H_kv, n, D] and values [H_kv, n, D_v] of one layer: the committed positions, then the scratch
        rows."""

    def commit(self, path: Sequence[int]) -> None:
        """Keep these of the rows fed since the last commit, root to leaf, and drop the remaining ones.

        Args:
            path: scratch rows, ascending; row i lies in slot `length + i`.
        """
        if path and path[-1] != len(path) - 1:
            settled = next(i for i, row in enumerate(path) if row != i)  # the rows before it lie where they belong
            self._move([self.length + row for row in path[settled:]], self.length + settled)
        if self.state is not None:
            self.state.commit(path)
        self.length += len(path)
        self.scratch_parents = []

    def drop(self, keep: int = 0) -> None:
        """Drop the rows fed since the last commit, but for the first `keep` of them."""
        del self.scratch_parents[keep:]
        if self.state is not None:
            self.state.drop(keep)

    def mark(self) -> None:
        """Keep the states of recurrent layers as they are now, so that `truncate` can bring them back."""
        if self.state is not None:
            self.marks[self.length] = self.state.saved()
            while len(self.marks) > _MOST_MARKS:
                del self.marks[min(self.marks)]

    def truncate(self, length: int) -> None:
        """Keep the first `length` committed positions only, and no scratch. With states of recurrent layers, keep those
        up to the last mark among them."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} positions to {length}")
        if self.state is not None and length < self.length:
            self.marks = {place: saved for place, saved in self.marks.items() if place <= length}
            length = max(self.marks, default=0)
            self.state.reset()
            if length:
                self.state.restore(self.marks[length])
        elif self.state is not None:
            self.state.drop(0)
        self.length = length
        self.scratch_parents = []
        self._num_published = min(self._num_published, length // PAGE)

    def free(self) -> None:
        """Give the memory back."""
        self.length = 0
        self.scratch_parents = []
        self._num_published = 0
        if self.state is not None:
            self.state.reset()
        self.marks = {}
        self._release()

    @abstractmethod
    def pages_wanted(self, num_slots: int) -> int:
        """Return the number of pages to take, see `types.Cache.pages_wanted`."""

    def adopt(self, token_ids: Sequence[int], tenant: str | None) -> int:
        """Take over a published prefix, see `types.Cache.adopt`."""
        self._be_empty()
        self._num_published, saved = self._adopt(token_ids, max(0, len(token_ids) - 1) // PAGE, tenant)
        self.length = self._num_published * PAGE
        if self.state is not None and self.length:
            self.state.restore(saved)
        return self.length

    def is_finite(self) -> bool:
        """Return whether the committed positions are finite, see `types.Cache.is_finite`.

        A row that is not finite in any layer is not in the last one either: residuals carry NaN on.
        """
        if self.state is not None and not self.state.is_finite():
            return False
        last = self.read(len(self.shapes) - 1) if self.shapes and self.length else ()
        return all(bool(numbers[:, : self.length].isfinite().all()) for numbers in last)

    def publish(self, token_ids: Sequence[int], tenant: str | None) -> None:
        """Publish whole pages, see `types.Cache.publish`."""
        end = min(len(token_ids), self.length) // PAGE
        if end > self._num_published:
            self._num_published = self._publish(self._num_published, end, token_ids, tenant)

    def fork(self, other: Cache, length: int) -> None:
        """Take over positions of another cache, see `types.Cache.fork`.

        Raises:
            TypeError: the other cache is of another model or class.
            ValueError: it holds fewer positions; or more, with states of recurrent layers.
        """
        if not isinstance(other, type(self)) or other.pool is not self.pool:
            raise TypeError(f"a {type(self).__name__} cannot fork a {type(other).__name__} of another model")
        if not 0 <= length <= other.length or (self.state is not None and length < other.length):
            raise ValueError(f"cannot fork {length} positions of a cache of {other.length}")
        self._be_empty()
        self._fork(other, length)
        if self.state is not None and other.state is not None:
            self.state.restore(other.state.saved())
        self.length = length

    def _be_empty(self) -> None:
        """Give back pages that are kept for later. Raises ValueError if there is anything else."""
        if self.length or self.scratch_parents:
            raise ValueError(f"a cache of {self.length} positions cannot take over others")
        if self.held:
            self.free()

    @abstractmethod
    def _adopt(self, token_ids: Sequence[int], most: int, tenant: str | None) -> tuple[int, Saved | None]:
        """Hold the positions of published pages, `most` of them at most. Return how many pages they were, and the state
        of recurrent layers after them."""

    @abstractmethod
    def _publish(self, first: int, end: int, token_ids: Sequence[int], tenant: str | None) -> int:
        """Publish the whole pages from `first` to `end`. Return how many from the start are published now."""

    @abstractmethod
    def _fork(self, other: Self, length: int) -> None:
        """Hold these positions of another cache."""

    @abstractmethod
    def _reserve(self, num_slots: int) -> None:
        """Reserve `num_slots` slots in all, of which those beyond `length` and scratch are going to be written."""

    @abstractmethod
    def _move(self, slots: Sequence[int], start: int) -> None:
        """Copy what lies in the given slots, ascending, to slots start, start + 1, ..., which may be among them."""

    @abstractmethod
    def _release(self) -> None:
        """Give all slots back."""


class Unpaged:
    """A base for stand-ins of caches (`types.Cache`), of models without a pool: nothing is bounded or published."""

    def pages_wanted(self, num_slots: int) -> int:
        """Return 0."""
        return 0

    def adopt(self, token_ids: Sequence[int], tenant: str | None) -> int:
        """Adopt nothing."""
        return 0

    def is_finite(self) -> bool:
        """Return False, as nothing is known of the numbers."""
        return False

    def publish(self, token_ids: Sequence[int], tenant: str | None) -> None:
        """Publish nothing."""
