"""The keys and values of one sequence, in pages as the native and the Triton kernels read them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.kernels.cpu.page_layout import PAGE, PageLayout
from forerun.kv_cache.page_pool import PagePool
from forerun.kv_cache.prefix_tree import Page
from forerun.kv_cache.recurrent_state import RecurrentState, Saved
from forerun.kv_cache.sequence_cache import SequenceCache


class PagedCache(SequenceCache):
    """Keys and values in pages that never move, in one of two forms (`kernels/cpu/page_layout.py`, and that of
    `kernels/triton/`). Growth copies nothing.

    The first pages may be shared: they are published, or another cache holds them too. Shared pages are never written.
    Where the cache was truncated into one, its first positions are copied to a new page before the next rows are
    written. Pages that are not shared are kept until `free`, whatever is dropped or truncated.

    Attributes:
        pages: the sequence's pages in order: slot s lies in pages[s // PAGE].
        addresses: [pages] uint64, where each begins; a new array whenever pages change.

    Args:
        pool: where pages come from, and go when they are given back.
        layout: of every page.
        state: of recurrent layers, of the sequence before its first token.
    """

    def __init__(self, pool: PagePool, layout: PageLayout, state: RecurrentState | None = None) -> None:
        super().__init__(pool, layout.shapes, layout.dtype, state)
        self.pages: list[Tensor] = []
        self.addresses: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._layout = layout
        self._num_shared = 0  # pages from the start that may be shared
        self._num_slots = 0  # slots in `pages`

    @property
    def nbytes(self) -> int:
        """Return the bytes held."""
        return len(self.held) * self._layout.nbytes + self._state_nbytes

    @torch.inference_mode()
    def write(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values, rounded to the cache's format, see `SequenceCache.write`."""
        start = self.length + row
        self._layout.write(self.pages, layer, range(start, start + keys.shape[1]), keys, values)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return copies of keys and values, see `SequenceCache.read`."""
        return self._layout.read(self.pages, layer, range(self.length + self.num_scratch))

    def truncate(self, length: int) -> None:
        """Truncate to `length` positions, see `SequenceCache.truncate`, and give back pages behind a shared one."""
        super().truncate(length)
        if self.length < self._num_shared * PAGE:
            self._give_back_beyond()

    def pages_wanted(self, num_slots: int) -> int:
        """Return the number of pages to take, see `types.Cache.pages_wanted`."""
        kept = len(self.held)
        copied = 0
        if self.length < self._num_shared * PAGE:
            kept = min(kept, -(-self.length // PAGE))
            copied = self.length % PAGE > 0 and _is_shared(self.held[kept - 1])
        return max(0, -(-num_slots // PAGE) - kept) + copied

    @torch.inference_mode()
    def _move(self, slots: Sequence[int], start: int) -> None:
        self._layout.move(self.pages, slots, start, self.addresses)

    def _reserve(self, num_slots: int) -> None:
        if self.length < self._num_shared * PAGE:
            self._stop_sharing()
        if num_slots > self._num_slots:
            try:
                self.pool.take(self.held, -(-num_slots // PAGE) - len(self.held))
            finally:
                self._changed()

    def _adopt(self, token_ids: Sequence[int], most: int, tenant: str | None) -> tuple[int, Saved | None]:
        self._num_shared = most
        self.pool.adopt(self.held, token_ids, most, tenant, with_state=self.state is not None)
        self._changed()
        self._num_shared = len(self.held)
        return self._num_shared, self.held[-1].state if self.held else None

    def _publish(self, first: int, end: int, token_ids: Sequence[int], tenant: str | None) -> int:
        self._num_shared = max(self._num_shared, end)
        try:
            return self.pool.publish(self.held, first, end, token_ids, tenant)
        finally:
            self.pool.keep_states(self.held, self.marks)
            self._changed()

    def _fork(self, other: PagedCache, length: int) -> None:
        whole, rest = divmod(length, PAGE)
        last: list[Page] = []
        self.pool.take(last, 1 if rest else 0)
        self._num_shared = whole
        other._num_shared = max(other._num_shared, whole)
        self.pool.share(self.held, other.held[:whole])
        if rest:
            self._copy(other.held[whole], last[0], rest)
            self.held += last
        self._changed()

    def _stop_sharing(self) -> None:
        """Replace the page that the length lies in by a copy, if it is shared."""
        self._give_back_beyond()
        index, rest = divmod(self.length, PAGE)
        if rest and _is_shared(self.held[index]):
            taken: list[Page] = []
            self.pool.take(taken, 1)
            self._copy(self.held[index], taken[0], rest)
            self.pool.exchange(self.held, index, taken)
        self._changed()
        self._num_shared = index

    def _give_back_beyond(self) -> None:
        """Give back the pages that lie beyond the length."""
        self._num_slots = 0
        self.pool.give_back(self.held, -(-self.length // PAGE))
        self._changed()

    @torch.inference_mode()
    def _copy(self, source: Page, target: Page, count: int) -> None:
        self._layout.copy_first(source.content[0], target.content[0], count)

    def _changed(self) -> None:
        """Update what depends on the list of pages."""
        self.pages = [page.content[0] for page in self.held]
        self.addresses = np.array([page.data_ptr() for page in self.pages], np.uint64)
        self._num_slots = len(self.pages) * PAGE

    def _release(self) -> None:
        self.pages = []
        self.addresses = np.empty(0, np.uint64)
        self._num_slots = 0
        self.pool.give_back(self.held)
        self._num_shared = 0


def _is_shared(page: Page) -> bool:
    return page.holders > 1 or page.node is not None
