"""The keys and values of one sequence, in the layout that attention reads without copying."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.config import KV_BLOCK


class SequenceCache:
    """Keys and values of one sequence, for every layer of one model.

    A forward writes its new rows' keys and values at slots `length + i`; they become part of the sequence
    only by `commit`. Whatever lies beyond `length` is scratch, and always finite.

    Layout per layer, chosen for the two matrix products of attention (`models/attention.py`):
    keys [H_kv, capacity, D], so that scores over any number of keys are one product;
    values [capacity / KV_BLOCK, H_kv, KV_BLOCK, D_v], so that a block can be read whole or in partial sums.

    Capacity doubles, so a sequence that grows to n tokens copies O(n) in total. Layers are allocated when they
    are first written, with the shapes they are written in.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.dtype = dtype
        self.device = device
        self.length = 0
        self._capacity = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

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
        self.keys = [_grown(key, 1, capacity) for key in self.keys]
        self.values = [_grown(value, 0, capacity // KV_BLOCK) for value in self.values]
        self._capacity = capacity

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the new rows of one layer at slots length, length + 1, ...

        Args:
            layer: index of the layer; layers are first written in order.
            keys: [H_kv, n, D]. values: [H_kv, n, D_v]. `reserve(n)` has been called.
        """
        if layer >= len(self.keys):
            self._allocate(layer, keys, values)
        start, n = self.length, keys.shape[1]
        self.keys[layer][:, start : start + n] = keys
        blocks = self.values[layer]
        done = 0
        while done < n:
            block, offset = divmod(start + done, KV_BLOCK)
            take = min(n - done, KV_BLOCK - offset)
            blocks[block, :, offset : offset + take] = values[:, done : done + take]
            done += take

    def commit(self, kept: Sequence[int]) -> None:
        """Keep these rows of the last forward, root to leaf, and forget the others.

        Args:
            kept: row indices of that forward, ascending; row i lies in slot `length + i`.
        """
        n = len(kept)
        if n and kept[-1] != n - 1:
            self._move([self.length + row for row in kept])
        self.length += n

    def truncate(self, length: int) -> None:
        """Roll back to the first `length` positions."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} positions to {length}")
        self.length = length

    def free(self) -> None:
        """Give the memory back."""
        self.keys, self.values = [], []
        self.length = self._capacity = 0

    def _allocate(self, layer: int, keys: Tensor, values: Tensor) -> None:
        if layer != len(self.keys):
            raise ValueError(f"layer {layer} written before layer {len(self.keys)}")
        heads, _, width = keys.shape
        # zeros, not empty: scratch meets a probability of exactly zero, and 0 * nan would be nan
        self.keys.append(torch.zeros(heads, self._capacity, width, dtype=self.dtype, device=self.device))
        shape = (self._capacity // KV_BLOCK, heads, KV_BLOCK, values.shape[2])
        self.values.append(torch.zeros(shape, dtype=self.dtype, device=self.device))

    @torch.inference_mode()
    def _move(self, slots: list[int]) -> None:
        """Copy the given slots to length, length + 1, ... (advanced indexing copies first, so overlap is safe)."""
        source = torch.tensor(slots, device=self.device)
        target = torch.arange(self.length, self.length + len(slots), device=self.device)
        for key in self.keys:
            key[:, target] = key[:, source]
        for value in self.values:
            value[target // KV_BLOCK, :, target % KV_BLOCK] = value[source // KV_BLOCK, :, source % KV_BLOCK]


def _grown(old: Tensor, dim: int, size: int) -> Tensor:
    shape = list(old.shape)
    shape[dim] = size
    new = old.new_zeros(shape)
    new.narrow(dim, 0, old.shape[dim]).copy_(old)
    return new
