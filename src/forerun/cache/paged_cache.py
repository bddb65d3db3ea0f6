"""The keys and values of one sequence, in pages as the native kernels read them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.cache.page_allocator import PageAllocator
from forerun.cache.sequence_cache import SequenceCache
from forerun.kernels.page_layout import PAGE


class PagedCache(SequenceCache):
    """Keys and values in pages (`kernels/page_layout.py`), which never move. Growth copies nothing.

    Pages are kept until `free`, whatever is dropped or truncated.

    Attributes:
        pages: the sequence's pages in order: slot s lies in pages[s // PAGE].
        addresses: [pages] uint64, where each begins; a new array whenever pages are added.

    Args:
        allocator: where pages come from, and go when they are freed. It knows the layers' shapes and the format.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        super().__init__(allocator.layout.shapes, allocator.layout.dtype)
        self.pages: list[Tensor] = []
        self.addresses: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._allocator = allocator
        self._layout = allocator.layout

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return len(self.pages) * self._layout.nbytes

    @torch.inference_mode()
    def write(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """As `SequenceCache.write`; numbers are rounded to the cache's format."""
        start = self.length + row
        self._layout.write(self.pages, layer, range(start, start + keys.shape[1]), keys, values)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """As `SequenceCache.read`: copies."""
        return self._layout.read(self.pages, layer, range(self.length + self.num_scratch))

    @torch.inference_mode()
    def _move(self, slots: Sequence[int], start: int) -> None:
        self._layout.move(self.pages, slots, start)

    def _reserve(self, num_slots: int) -> None:
        while len(self.pages) * PAGE < num_slots:
            page = self._allocator.take()
            self.addresses = np.append(self.addresses, np.uint64(page.data_ptr()))
            self.pages.append(page)

    def _release(self) -> None:
        self._allocator.give_back(self.pages)
        self.pages, self.addresses = [], np.empty(0, np.uint64)
