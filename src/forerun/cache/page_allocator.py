"""Where the pages of one model's caches come from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.kernels.page_layout import PageLayout

_ALIGNMENT = 64
"""Bytes: a line of the processor's cache, and a vector of AVX-512."""


class PageAllocator:
    """Pages on demand, and those that were given back again.

    Attributes:
        layout: of every page.
        num_taken: pages that somebody holds.
    """

    def __init__(self, layout: PageLayout) -> None:
        self.layout = layout
        self.num_taken = 0
        self._free: list[Tensor] = []

    @property
    def num_free(self) -> int:
        """Pages given back that nobody has taken since."""
        return len(self._free)

    @torch.inference_mode(False)
    def take(self) -> Tensor:
        """A page of zeros, [layout.size], which begins at a multiple of 64 bytes. Torch lets anyone write to it, taken
        within inference mode or not."""
        try:
            page = self._free.pop().zero_()  # a sequence that failed may have left NaN there
        except IndexError:
            page = self._new()
        self.num_taken += 1
        return page

    def give_back(self, pages: Sequence[Tensor]) -> None:
        """Nobody reads or writes these pages any more."""
        self.num_taken -= len(pages)
        self._free += pages

    def _new(self) -> Tensor:
        extra = _ALIGNMENT // self.layout.dtype.itemsize
        room = torch.zeros(self.layout.size + extra, dtype=self.layout.dtype)
        start = -room.data_ptr() % _ALIGNMENT // self.layout.dtype.itemsize
        return room[start : start + self.layout.size]
