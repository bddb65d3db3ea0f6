"""Where an accepted path moves together in the cache, over the rows that were rejected."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Stacks:
    """All keys and values of one shape side by side, so that one operation moves a path in all layers: 8 us instead of
    190 for 16 layers. Made when a path is first moved, and again after growth; who only follows chains never pays for
    it.

    Args:
        stacks: each [tensors, H_kv, slots, width].
    """

    def __init__(self, stacks: list[Tensor]) -> None:
        self._stacks = stacks

    @classmethod
    def of(cls, keys: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Stacks, list[Tensor], list[Tensor]]:
        """The stacks, and keys and values by layer as views of them."""
        tensors = [*keys, *values]
        alike: dict[torch.Size, list[int]] = {}
        for i, tensor in enumerate(tensors):
            alike.setdefault(tensor.shape, []).append(i)
        stacks = []
        for indices in alike.values():
            stack = torch.stack([tensors[i] for i in indices])
            stacks.append(stack)
            for place, i in enumerate(indices):
                tensors[i] = stack[place]
        return cls(stacks), tensors[: len(keys)], tensors[len(keys) :]

    @torch.inference_mode()
    def move(self, slots: list[int], start: int) -> None:
        """Copy the given slots to start, start + 1, ... (index_select copies first, so overlap is safe)."""
        source = torch.tensor(slots, device=self._stacks[0].device)
        for stack in self._stacks:
            stack[:, :, start : start + len(slots)] = stack.index_select(2, source)
