"""The keys and values of one sequence, in the layout that attention reads without copying."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.cache.commit_path import Stacks
from forerun.kernels.partition import KV_BLOCK


class SequenceCache:
    """Keys and values of one sequence, for every layer of one model.

    `feed` adds a forward's rows to the scratch, which lies in the slots beyond `length` in the order in which it was
    fed; the forward writes their keys and values there; they become part of the sequence only by `commit`. Whatever
    lies beyond `length` is finite.

    Layout per layer: keys [H_kv, capacity, D], values [H_kv, capacity, D_v], so that attention reads any span of
    positions as one strided batch of matrices. Capacity doubles, so a sequence that grows to n tokens copies O(n) in
    total. Layers are allocated when the first rows are fed; a layer whose shape was not given, when it is first
    written.

    Args:
        shapes: by layer, (H_kv, D, D_v).
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        shapes: Sequence[tuple[int, int, int]] = (),
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._shapes = shapes
        self.length = 0
        self.scratch_parents: list[int] = []
        self._capacity = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._stacks: Stacks | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.nbytes for t in (*self.keys, *self.values))

    @property
    def num_scratch(self) -> int:
        """Rows fed since the last commit."""
        return len(self.scratch_parents)

    def feed(self, parents: Sequence[int]) -> None:
        """Add rows to the scratch, and make room for them.

        Args:
            parents: of each new row, the scratch row that it follows, below its own index; -1 for the last position.

        Raises:
            ValueError: a parent is not there.
        """
        first = self.num_scratch
        for row, parent in enumerate(parents, first):
            if not -1 <= parent < row:
                raise ValueError(f"row {row} of the scratch cannot follow row {parent}")
        self._reserve(first + len(parents) + 1)  # a tree reads one slot that no row sees
        self.scratch_parents += parents

    def write(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values of one layer for scratch rows `row`, `row + 1`, ...

        Args:
            layer: index of the layer; layers are first written in order.
            keys: [H_kv, n, D]. values: [H_kv, n, D_v].
        """
        if layer >= len(self.keys):
            if layer != len(self.keys):
                raise ValueError(f"layer {layer} written before layer {len(self.keys)}")
            self._allocate(keys.shape[0], keys.shape[2], values.shape[2])
        start = self.length + row
        self.keys[layer][:, start : start + keys.shape[1]] = keys
        self.values[layer][:, start : start + keys.shape[1]] = values

    def commit(self, path: Sequence[int]) -> None:
        """Keep these of the rows fed since the last commit, root to leaf, and drop the others.

        Args:
            path: scratch rows, ascending; row i lies in slot `length + i`.
        """
        n = len(path)
        if n and path[-1] != n - 1:
            if self._stacks is None:
                self._stacks, self.keys, self.values = Stacks.of(self.keys, self.values)
            settled = next(i for i, row in enumerate(path) if row != i)
            self._stacks.move([self.length + row for row in path[settled:]], self.length + settled)
        self.length += n
        self.scratch_parents = []

    def drop(self, keep: int = 0) -> None:
        """Drop the rows fed since the last commit, but for the first `keep` of them."""
        del self.scratch_parents[keep:]

    def truncate(self, length: int) -> None:
        """Keep the first `length` committed positions only, and no scratch."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} positions to {length}")
        self.length = length
        self.scratch_parents = []

    def free(self) -> None:
        """Give the memory back."""
        self.keys, self.values, self._stacks, self.scratch_parents = [], [], None, []
        self.length = self._capacity = 0

    def _reserve(self, num_rows: int) -> None:
        """Make room for num_rows slots beyond `length`."""
        needed = self.length + num_rows
        if needed <= self._capacity:
            return
        capacity = max(KV_BLOCK, self._capacity)
        while capacity < needed:
            capacity *= 2
        self.keys = [_grown(key, capacity) for key in self.keys]
        self.values = [_grown(value, capacity) for value in self.values]
        self._stacks = None
        self._capacity = capacity
        for shape in self._shapes[len(self.keys) :]:
            self._allocate(*shape)

    def _allocate(self, heads: int, key_width: int, value_width: int) -> None:
        # zeros, not empty: scratch meets a probability of exactly zero, and 0 * nan would be nan
        for store, width in ((self.keys, key_width), (self.values, value_width)):
            store.append(torch.zeros(heads, self._capacity, width, dtype=self.dtype, device=self.device))
        self._stacks = None


def _grown(old: Tensor, capacity: int) -> Tensor:
    new = old.new_zeros(old.shape[0], capacity, old.shape[2])
    new[:, : old.shape[1]] = old
    return new
