"""The layout of keys and values in a page on a device: a run of [PAGE, D] per layer, per keys or values, per key head.

A page belongs to all layers. It lies at one address as long as the pool has it, and begins at a multiple of LINE bytes,
so that kernels find it by its distance from another page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.kernels.cpu.page_layout import PAGE, PageLayout, Shape, by_page
from forerun.kernels.triton.step_arrays import LINE


class DevicePageLayout(PageLayout):  # all of it is its own, to the core it is one
    """The layout of one model's pages, all of whose layers are alike: each page is a one-dimensional tensor of `size`
    numbers.

    Attributes:
        shapes: by layer.
        dtype: of keys and values.
        device: where pages lie.
        size: numbers in a page. nbytes: of a page.
        layer_starts: by layer, the first number of its keys in a page.

    Args:
        shapes: by layer, all the same: heads of keys, width of a key, width of a value, which is the same too.
    """

    def __init__(self, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device) -> None:
        heads, width, value_width = shapes[0]
        if width != value_width or len(set(shapes)) > 1:
            raise ValueError(f"layers of the shapes {sorted(set(shapes))} do not lie in one page")
        num_layers = len(shapes)
        self.shapes = list(shapes)
        self.dtype = dtype
        self.device = device
        self._view = (num_layers, 2, heads, PAGE, width)
        layer_size = 2 * heads * PAGE * width
        self.layer_starts = [layer * layer_size for layer in range(num_layers)]
        self.size = num_layers * layer_size
        self.nbytes = self.size * dtype.itemsize

    def new_page(self) -> Tensor:
        """Return a zeroed page, [size], aligned to LINE bytes."""
        extra = LINE // self.dtype.itemsize
        padded = torch.zeros(self.size + extra, dtype=self.dtype, device=self.device)
        start = -padded.data_ptr() % LINE // self.dtype.itemsize
        return padded[start : start + self.size]

    def copy_first(self, source: Tensor, target: Tensor, count: int) -> None:
        """Copy the first `count` slots of one page to another."""
        target.view(self._view)[:, :, :, :count] = source.view(self._view)[:, :, :, :count]

    def read(self, pages: Sequence[Tensor], layer: int, slots: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return copies of one layer's keys [H_kv, n, D] and values [H_kv, n, D] in these slots."""
        heads, width, _ = self.shapes[layer]
        empty = torch.empty(2, heads, 0, width, dtype=self.dtype, device=self.device)
        parts = [pages[page].view(self._view)[layer][:, :, offsets] for page, offsets in by_page(slots)]
        keys, values = torch.cat([empty, *parts], 2)
        return keys, values

    def write(self, pages: Sequence[Tensor], layer: int, slots: Iterable[int], keys: Tensor, values: Tensor) -> None:
        """Store keys and values, [H_kv, n, D], of one layer in these slots, rounded to nearest."""
        numbers = torch.stack([keys, values]).to(self.device, self.dtype)
        done = 0
        for page, offsets in by_page(slots):
            pages[page].view(self._view)[layer][:, :, offsets] = numbers[:, :, done : done + len(offsets)]
            done += len(offsets)

    def move(
        self, pages: Sequence[Tensor], slots: Sequence[int], start: int, addresses: NDArray[np.uint64] | None = None
    ) -> None:
        """Copy the contents of these slots, in all layers, to slots start, start + 1, ... All slots are read before any
        is written.

        addresses: of the pages, which are not needed here.
        """
        numbers = torch.cat([pages[page].view(self._view)[:, :, :, offsets] for page, offsets in by_page(slots)], 3)
        done = 0
        for page, offsets in by_page(range(start, start + len(slots))):
            pages[page].view(self._view)[:, :, :, offsets] = numbers[:, :, :, done : done + len(offsets)]
            done += len(offsets)
