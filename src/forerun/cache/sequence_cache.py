"""The keys and values of one sequence, in the layout that attention reads without copying."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from forerun.config import KV_BLOCK


class SequenceCache:
    """Keys and values of one sequence, for every layer of one model.

    A forward writes its new rows' keys and values at slots `length + i`; they become part of the sequence
    only by `commit`. Whatever lies beyond `length` is scratch, and always finite.

    Layout per layer: keys [H_kv, capacity, D], values [H_kv, capacity, D_v], so that attention reads any span of
    positions as one strided batch of matrices. Capacity doubles, so a sequence that grows to n tokens copies O(n) in
    total. Layers are allocated when they are first written, with the shapes they are written in.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.dtype = dtype
        self.device = device
        self.length = 0
        self._capacity = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._stacks: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def reserve(self, num_rows: int) -> None:
        """Make room for num_rows slots beyond `length`."""
        needed = self.length + num_rows
        if needed <= self._capacity:
            return
        capacity = max(KV_BLOCK, self._capacity)
        while capacity < needed:
            capacity *= 2
        self.keys = [_grown(key, capacity) for key in self.keys]
        self.values = [_grown(value, capacity) for value in self.values]
        self._stacks = []
        self._capacity = capacity

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the new rows of one layer at slots length, length + 1, ...

        Args:
            layer: index of the layer; layers are first written in order.
            keys: [H_kv, n, D]. values: [H_kv, n, D_v]. `reserve(n)` has been called.
        """
        if layer >= len(self.keys):
            self._allocate(layer, keys, values)
        start, end = self.length, self.length + keys.shape[1]
        self.keys[layer][:, start:end] = keys
        self.values[layer][:, start:end] = values

    def commit(self, kept: Sequence[int]) -> None:
        """Keep these rows of the last forward, root to leaf, and forget the others.

        Args:
            kept: row indices of that forward, ascending; row i lies in slot `length + i`.
        """
        n = len(kept)
        if n and kept[-1] != n - 1:
            if not self._stacks:
                self._stack()
            settled = next(i for i, row in enumerate(kept) if row != i)
            self._move([self.length + row for row in kept[settled:]], self.length + settled)
        self.length += n

    @contextmanager
    def ahead(self, num_rows: int) -> Iterator[None]:
        """Stand num_rows slots further on while inside, over scratch that earlier forwards wrote, so that the next
        forward's rows follow it; then stand where it stood, with all of it as scratch."""
        length = self.length
        self.reserve(num_rows)
        self.length += num_rows
        try:
            yield
        finally:
            self.length = length

    def truncate(self, length: int) -> None:
        """Roll back to the first `length` positions."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} positions to {length}")
        self.length = length

    def free(self) -> None:
        """Give the memory back."""
        self.keys, self.values, self._stacks = [], [], []
        self.length = self._capacity = 0

    def _allocate(self, layer: int, keys: Tensor, values: Tensor) -> None:
        if layer != len(self.keys):
            raise ValueError(f"layer {layer} written before layer {len(self.keys)}")
        # zeros, not empty: scratch meets a probability of exactly zero, and 0 * nan would be nan
        for store, new in ((self.keys, keys), (self.values, values)):
            heads, _, width = new.shape
            store.append(torch.zeros(heads, self._capacity, width, dtype=self.dtype, device=self.device))
        self._stacks = []

    @torch.inference_mode()
    def _move(self, slots: list[int], start: int) -> None:
        """Copy the given slots to start, start + 1, ... (index_select copies first, so overlap is safe)."""
        source = torch.tensor(slots, device=self.device)
        for stack in self._stacks:
            stack[:, :, start : start + len(slots)] = stack.index_select(2, source)

    def _stack(self) -> None:
        """Lay all tensors of one shape side by side, so that one operation moves a path in all layers: 8 us instead of
        190 for 16 layers. Done when a path is first moved, and again after growth; who only follows chains never
        pays for it."""
        tensors = [*self.keys, *self.values]
        alike: dict[torch.Size, list[int]] = {}
        for i, tensor in enumerate(tensors):
            alike.setdefault(tensor.shape, []).append(i)
        for indices in alike.values():
            stack = torch.stack([tensors[i] for i in indices])
            self._stacks.append(stack)
            for layer, i in enumerate(indices):
                tensors[i] = stack[layer]
        self.keys, self.values = tensors[: len(self.keys)], tensors[len(self.keys) :]


def _grown(old: Tensor, capacity: int) -> Tensor:
    new = old.new_zeros(old.shape[0], capacity, old.shape[2])
    new[:, : old.shape[1]] = old
    return new
