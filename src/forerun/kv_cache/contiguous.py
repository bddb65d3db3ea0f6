"""The keys and values of one sequence, in the layout that the PyTorch reference of attention reads without copying."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.kernels.cpu.page_layout import PAGE, Shape
from forerun.kernels.partition import KV_BLOCK
from forerun.kv_cache.page_pool import PagePool
from forerun.kv_cache.prefix_tree import Page
from forerun.kv_cache.recurrent_state import RecurrentState, Saved
from forerun.kv_cache.sequence_cache import SequenceCache


def bytes_per_page(shapes: Sequence[Shape], dtype: torch.dtype) -> int:
    """Return the bytes of PAGE positions in a contiguous cache; without a layer one a position, so that they count."""
    return PAGE * (dtype.itemsize * sum(heads * (key + value) for heads, key, value in shapes) or 1)


class ContiguousCache(SequenceCache):
    """Keys and values in one run of slots per layer: keys [H_kv, capacity, D], values [H_kv, capacity, D_v].

    So attention reads any span of positions as one strided batch of matrices. Capacity doubles: a sequence that grows
    to n tokens copies O(n) in total. Memory is allocated when the first rows are fed. All keys and values of one shape
    lie in one tensor [tensors, H_kv, capacity, width], so that one operation moves a path in all layers.

    The slots come out of the pool by count: the pages held have no memory of their own. Published pages are copies,
    which no cache holds, and adopting copies them.

    Attributes:
        keys: by layer, [H_kv, capacity, D]. values: by layer, [H_kv, capacity, D_v].

    Args:
        pool: of pages without memory.
        shapes: by layer, (H_kv, D, D_v).
        state: of recurrent layers, of the sequence before its first token.
    """

    def __init__(
        self,
        pool: PagePool,
        shapes: Sequence[Shape],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        state: RecurrentState | None = None,
    ) -> None:
        super().__init__(pool, shapes, dtype, state)
        self.device = device
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._stacks: dict[tuple[int, int], Tensor] = {}  # by heads and width
        self._capacity = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes held."""
        return sum(stack.nbytes for stack in self._stacks.values()) + self._state_nbytes

    @torch.inference_mode()
    def write(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values of scratch rows, see `SequenceCache.write`."""
        start = self.length + row
        self.keys[layer][:, start : start + keys.shape[1]] = keys
        self.values[layer][:, start : start + keys.shape[1]] = values

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of keys and values, see `SequenceCache.read`."""
        end = self.length + self.num_scratch
        return self.keys[layer][:, :end], self.values[layer][:, :end]

    def pages_wanted(self, num_slots: int) -> int:
        """Return the number of pages to take, see `types.Cache.pages_wanted`."""
        return max(0, self._capacity_for(num_slots) // PAGE - len(self.held))

    @torch.inference_mode()
    def _move(self, slots: Sequence[int], start: int) -> None:
        for stack in self._stacks.values():
            # index_select copies first, so that overlap does no harm
            stack[:, :, start : start + len(slots)] = stack.index_select(2, torch.tensor(slots, device=stack.device))

    @torch.inference_mode()
    def _adopt(self, token_ids: Sequence[int], most: int, tenant: str | None) -> tuple[int, Saved | None]:
        found: list[Page] = []
        try:
            self.pool.adopt(found, token_ids, most, tenant, with_state=self.state is not None)
            while found and self.pages_wanted(len(found) * PAGE) > self.pool.num_available:
                self.pool.give_back(found, len(found) - 1)  # what is copied from must not be evicted for the copy
            if self.state is not None and found and found[-1].state is None:
                return 0, None
            if found:
                self._reserve(len(found) * PAGE)
            for index, page in enumerate(found):
                for stack, numbers in zip(self._stacks.values(), page.content, strict=True):
                    stack[:, :, index * PAGE : (index + 1) * PAGE] = numbers
            return len(found), found[-1].state if found else None
        finally:
            self.pool.give_back(found)

    @torch.inference_mode()
    def _publish(self, first: int, end: int, token_ids: Sequence[int], tenant: str | None) -> int:
        pages: list[Page] = []
        try:
            self.pool.adopt(pages, token_ids, end, tenant)
            num_found = len(pages)
            while len(pages) < end and self.pool.num_available:
                self.pool.take(pages, 1)
                slots = slice((len(pages) - 1) * PAGE, len(pages) * PAGE)
                pages[-1].content += [stack[:, :, slots].clone() for stack in self._stacks.values()]
            num_published = self.pool.publish(pages, num_found, len(pages), token_ids, tenant)
            self.pool.keep_states(pages, self.marks)
            return num_published
        finally:
            self.pool.give_back(pages)

    @torch.inference_mode()
    def _fork(self, other: ContiguousCache, length: int) -> None:
        if not length:
            return
        self._reserve(length)
        for shape, stack in self._stacks.items():
            stack[:, :, :length] = other._stacks[shape][:, :, :length]

    def _reserve(self, num_slots: int) -> None:
        capacity = self._capacity_for(num_slots)
        if capacity <= self._capacity:
            return
        self.pool.take(self.held, capacity // PAGE - len(self.held))
        counts: dict[tuple[int, int], int] = {}
        tensor_of = []
        for heads, key_width, value_width in self.shapes:
            for shape in ((heads, key_width), (heads, value_width)):
                tensor_of.append((shape, counts.get(shape, 0)))
                counts[shape] = counts.get(shape, 0) + 1
        self._stacks = {shape: self._grown(shape, count, capacity) for shape, count in counts.items()}
        tensors = [self._stacks[shape][index] for shape, index in tensor_of]
        self.keys = tensors[::2]
        self.values = tensors[1::2]
        self._capacity = capacity

    def _capacity_for(self, num_slots: int) -> int:
        """Return the capacity in slots that holds `num_slots` of them."""
        needed = num_slots + 1  # of a tree, attention reads one slot that no row sees
        capacity = max(KV_BLOCK, self._capacity)
        while capacity < needed:
            capacity *= 2
        return capacity

    def _grown(self, shape: tuple[int, int], count: int, capacity: int) -> Tensor:
        heads, width = shape
        # zeros, not empty: scratch meets a probability of exactly zero, and 0 * nan would be nan
        new = torch.zeros(count, heads, capacity, width, dtype=self.dtype, device=self.device)
        if shape in self._stacks:
            new[:, :, : self._capacity] = self._stacks[shape]
        return new

    def _release(self) -> None:
        self.keys = []
        self.values = []
        self._stacks = {}
        self._capacity = 0
        self.pool.give_back(self.held)
