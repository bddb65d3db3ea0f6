"""The keys and values of one sequence, in the layout that the PyTorch reference of attention reads without copying."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.cache.commit_path import move_in_stacks
from forerun.cache.sequence_cache import SequenceCache
from forerun.kernels.partition import KV_BLOCK


class ContiguousCache(SequenceCache):
    """Keys and values in one run of slots per layer: keys [H_kv, capacity, D], values [H_kv, capacity, D_v].

    So attention reads any span of positions as one strided batch of matrices. Capacity doubles: a sequence that grows
    to n tokens copies O(n) in total. Memory is allocated when the first rows are fed. All keys and values of one shape
    lie in one tensor [tensors, H_kv, capacity, width], so that one operation moves a path in all layers.

    Attributes:
        keys: by layer, [H_kv, capacity, D]. values: by layer, [H_kv, capacity, D_v].

    Args:
        shapes: by layer, (H_kv, D, D_v).
    """

    def __init__(
        self, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(shapes, dtype)
        self.device = device
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._stacks: dict[tuple[int, int], Tensor] = {}  # by heads and width
        self._capacity = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(stack.nbytes for stack in self._stacks.values())

    @torch.inference_mode()
    def write(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """As `SequenceCache.write`."""
        start = self.length + row
        self.keys[layer][:, start : start + keys.shape[1]] = keys
        self.values[layer][:, start : start + keys.shape[1]] = values

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """As `SequenceCache.read`: views."""
        end = self.length + self.num_scratch
        return self.keys[layer][:, :end], self.values[layer][:, :end]

    def _move(self, slots: Sequence[int], start: int) -> None:
        move_in_stacks(self._stacks.values(), slots, start)

    def _reserve(self, num_slots: int) -> None:
        needed = num_slots + 1  # of a tree, attention reads one slot that no row sees
        if needed <= self._capacity:
            return
        capacity = max(KV_BLOCK, self._capacity)
        while capacity < needed:
            capacity *= 2
        counts: dict[tuple[int, int], int] = {}
        places = []
        for heads, key_width, value_width in self.shapes:
            for kind in ((heads, key_width), (heads, value_width)):
                places.append((kind, counts.get(kind, 0)))
                counts[kind] = counts.get(kind, 0) + 1
        self._stacks = {kind: self._grown(kind, count, capacity) for kind, count in counts.items()}
        tensors = [self._stacks[kind][place] for kind, place in places]
        self.keys, self.values, self._capacity = tensors[::2], tensors[1::2], capacity

    def _grown(self, kind: tuple[int, int], count: int, capacity: int) -> Tensor:
        heads, width = kind
        # zeros, not empty: scratch meets a probability of exactly zero, and 0 * nan would be nan
        new = torch.zeros(count, heads, capacity, width, dtype=self.dtype, device=self.device)
        if kind in self._stacks:
            new[:, :, : self._capacity] = self._stacks[kind]
        return new

    def _release(self) -> None:
        self.keys, self.values, self._stacks, self._capacity = [], [], {}, 0
