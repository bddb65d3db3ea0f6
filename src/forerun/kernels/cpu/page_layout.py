"""The layout of keys and values in the pages of the native kernels.

A page is one run of memory for PAGE positions of all layers. By layer:
    keys    [H_kv][PAGE / LANES][D][LANES]: scores of LANES keys add up lane by lane;
    values  [H_kv][ceil(D_v / LANES)][PAGE][LANES]: LANES numbers of a row's result add up over the positions;
    scales  [2][H_kv][PAGE] float32, of keys and of values, if these are int8: a number is its byte times its scale.
A row of a head is quantized by itself when it is written (`quantize_symmetric`), so no other row changes its bits.
Every layer begins at a multiple of 64 bytes from the page's start. Slot s lies in the page s // PAGE of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.kernels.cpu import native_for
from forerun.kernels.cpu.library import HEADER, Library
from forerun.kernels.quantize import quantize_symmetric

PAGE = 64
"""Positions in a page."""
_ALIGNMENT = 64
"""Bytes: a line of the processor's cache, and a vector of AVX-512."""
LANES = 16
"""Numbers side by side: a vector of float32 on AVX-512."""
CACHE_FORMATS = {
    getattr(torch, name.removeprefix("CACHE_").lower()): number
    for name, number in HEADER.enums["ForerunCacheFormat"].items()
}
"""Formats of keys and values, and the library's numbers for them."""

Shape = tuple[int, int, int]
"""Of a layer: heads of keys, width of a key, width of a value."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive layers of one shape, stored from number `start` of a page on."""

    start: int
    num_layers: int
    shape: Shape
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Return the count of numbers in the run; a scale takes the room of four numbers of int8."""
        scales = 8 * self.shape[0] * PAGE if self.dtype == torch.int8 else 0
        return self.num_layers * (_numbers(self.shape) + scales)

    def keys(self, page: Tensor) -> Tensor:
        """Return a view [layers, H_kv, PAGE / LANES, LANES, D] of a page."""
        heads, width, _ = self.shape
        part = self._layers(page)[:, : _key_numbers(self.shape)]
        return part.view(-1, heads, PAGE // LANES, width, LANES).transpose(3, 4)

    def values(self, page: Tensor) -> Tensor:
        """Return a view [layers, H_kv, PAGE, ceil(D_v / LANES), LANES] of a page."""
        heads, _, width = self.shape
        part = self._layers(page)[:, _key_numbers(self.shape) : _numbers(self.shape)]
        return part.view(-1, heads, -(-width // LANES), PAGE, LANES).transpose(2, 3)

    def scales(self, page: Tensor) -> Tensor:
        """Return a view [layers, 2, H_kv, PAGE] float32 of an int8 page: the scales of keys, and of values."""
        return self._layers(page)[:, _numbers(self.shape) :].view(torch.float32).view(-1, 2, self.shape[0], PAGE)

    def _layers(self, page: Tensor) -> Tensor:
        return page[self.start : self.start + self.size].view(self.num_layers, -1)


class PageLayout:
    """The layout of one model's pages: each page is a one-dimensional tensor of `size` numbers.

    Attributes:
        shapes: by layer.
        dtype: of keys and values, one of CACHE_FORMATS.
        size: numbers in a page, scales counted as `_Run.size` does.
        nbytes: of a page.
        layer_starts: by layer, the first number of its keys in a page.
    """

    def __init__(self, shapes: Sequence[Shape], dtype: torch.dtype) -> None:
        if dtype not in CACHE_FORMATS:
            raise ValueError(f"pages hold {', '.join(map(str, CACHE_FORMATS))}, not {dtype}")
        self.shapes = list(shapes)
        self.dtype = dtype
        self.layer_starts: list[int] = []
        self._runs: list[_Run] = []
        self._positions: list[tuple[_Run, int]] = []  # by layer, its run and its index there
        start = 0
        for shape, alike in groupby(self.shapes):
            run = _Run(start, len(list(alike)), shape, dtype)
            self._runs.append(run)
            self._positions += [(run, i) for i in range(run.num_layers)]
            self.layer_starts += [start + i * run.size // run.num_layers for i in range(run.num_layers)]
            start += run.size
        self.size = start or _ALIGNMENT // dtype.itemsize  # without a layer, pages count positions
        self.nbytes = self.size * dtype.itemsize

    def new_page(self) -> Tensor:
        """Return a zeroed page, [size], aligned to 64 bytes."""
        # NumPy takes zeros from the system when they are touched; torch would have all its threads write them
        padded = torch.from_numpy(np.zeros(self.nbytes + _ALIGNMENT, np.uint8))
        start = -padded.data_ptr() % _ALIGNMENT
        return padded[start : start + self.nbytes].view(self.dtype)

    def copy_first(self, source: Tensor, target: Tensor, count: int) -> None:
        """Copy the first `count` slots of one page to another."""
        groups, lanes = divmod(count, LANES)
        for run in self._runs:
            old = run.keys(source)
            new = run.keys(target)
            new[:, :, :groups] = old[:, :, :groups]
            if lanes:
                new[:, :, groups, :lanes] = old[:, :, groups, :lanes]
            run.values(target)[:, :, :count] = run.values(source)[:, :, :count]
            if self.dtype == torch.int8:
                run.scales(target)[..., :count] = run.scales(source)[..., :count]

    def read(self, pages: Sequence[Tensor], layer: int, slots: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return copies of one layer's keys [H_kv, n, D] and values [H_kv, n, D_v] in these slots; of int8 ones, the
        float32 numbers that they stand for."""
        run, index = self._positions[layer]
        heads, key_width, value_width = run.shape
        keys = [pages[0].new_empty(heads, 0, key_width)]
        values = [pages[0].new_empty(heads, 0, value_width)]
        scales = [torch.empty(2, heads, 0)]
        for page, offsets in by_page(slots):
            keys.append(run.keys(pages[page])[index][:, offsets // LANES, offsets % LANES])
            values.append(run.values(pages[page])[index][:, offsets].flatten(2)[..., :value_width])
            if self.dtype == torch.int8:
                scales.append(run.scales(pages[page])[index][..., offsets])
        if self.dtype != torch.int8:
            return torch.cat(keys, 1), torch.cat(values, 1)
        of_keys, of_values = torch.cat(scales, 2).unsqueeze(-1)
        return torch.cat(keys, 1) * of_keys, torch.cat(values, 1) * of_values

    def write(self, pages: Sequence[Tensor], layer: int, slots: Iterable[int], keys: Tensor, values: Tensor) -> None:
        """Store keys [H_kv, n, D] and values [H_kv, n, D_v] of one layer in these slots, rounded to nearest."""
        run, index = self._positions[layer]
        scales = torch.empty(2, len(keys), 0)
        if self.dtype == torch.int8:
            (keys, of_keys), (values, of_values) = quantize_symmetric(keys.float()), quantize_symmetric(values.float())
            scales = torch.stack([of_keys, of_values]).squeeze(-1)
        chunks = -(-run.shape[2] // LANES)
        padded = torch.nn.functional.pad(values, (0, chunks * LANES - values.shape[2]))
        padded = padded.view(*values.shape[:2], chunks, LANES)
        done = 0
        for page, offsets in by_page(slots):
            part = slice(done, done + len(offsets))
            run.keys(pages[page])[index][:, offsets // LANES, offsets % LANES] = keys[:, part].to(self.dtype)
            run.values(pages[page])[index][:, offsets] = padded[:, part].to(self.dtype)
            if self.dtype == torch.int8:
                run.scales(pages[page])[index][..., offsets] = scales[..., part]
            done += len(offsets)

    def move(
        self, pages: Sequence[Tensor], slots: Sequence[int], start: int, addresses: NDArray[np.uint64] | None = None
    ) -> None:
        """Copy the contents of these slots, in all layers, to slots start, start + 1, ... All slots are read before any
        is written.

        addresses: [pages] where each begins; None: taken from the pages.
        """
        library = native_for(pages[0].device)
        if library is not None:
            if addresses is None:
                addresses = np.array([page.data_ptr() for page in pages], np.uint64)
            self._move_natively(library, addresses, slots, start)
            return
        sources = list(by_page(slots))
        targets = list(by_page(range(start, start + len(slots))))
        for run in self._runs:
            keys = torch.cat([run.keys(pages[page])[:, :, at // LANES, at % LANES] for page, at in sources], 2)
            values = torch.cat([run.values(pages[page])[:, :, at] for page, at in sources], 2)
            is_int8 = self.dtype == torch.int8
            scales = torch.cat([run.scales(pages[page])[..., at] for page, at in sources], 3) if is_int8 else None
            done = 0
            for page, at in targets:
                part = slice(done, done + len(at))
                run.keys(pages[page])[:, :, at // LANES, at % LANES] = keys[:, :, part]
                run.values(pages[page])[:, :, at] = values[:, :, part]
                if scales is not None:
                    run.scales(pages[page])[..., at] = scales[..., part]
                done += len(at)

    def _move_natively(self, library: Library, addresses: NDArray[np.uint64], slots: Sequence[int], start: int) -> None:
        shapes = np.array(self.shapes, np.int32)
        moved = np.array(slots, np.int64)
        starts = np.array(self.layer_starts, np.int64) * self.dtype.itemsize
        library.move_slots(
            addresses.ctypes.data,
            shapes.ctypes.data,
            starts.ctypes.data,
            len(self.shapes),
            PAGE,
            self.dtype.itemsize,
            moved.ctypes.data,
            len(slots),
            start,
        )


def _key_numbers(shape: Shape) -> int:
    heads, width, _ = shape
    return heads * PAGE * width


def _numbers(shape: Shape) -> int:
    heads, _, width = shape
    return _key_numbers(shape) + heads * PAGE * -(-width // LANES) * LANES


def by_page(slots: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
    """Yield the pages in the order of the slots, with the slots inside each page, [n] int64."""
    for page, group in groupby(slots, lambda slot: slot // PAGE):
        yield page, torch.tensor([slot % PAGE for slot in group])
