"""Where an accepted path moves together in the cache, over the rows that were rejected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def slots_to_move(path: Sequence[int], length: int) -> tuple[list[int], int]:
    """The slots whose contents move, ascending, and the slot from which on they then lie one after another.

    Rows that lie where they belong stay: of a path that is a prefix of the scratch nothing moves.

    Args:
        path: scratch rows to keep, ascending; row i lies in slot length + i.
    """
    if not path or path[-1] == len(path) - 1:
        return [], length
    settled = next(i for i, row in enumerate(path) if row != i)
    return [length + row for row in path[settled:]], length + settled


@torch.inference_mode()
def move_in_stacks(stacks: Iterable[Tensor], slots: Sequence[int], start: int) -> None:
    """Copy what lies in the given slots of each stack to slots start, start + 1, ...

    Args:
        stacks: each [tensors, H_kv, slots, width].
    """
    for stack in stacks:
        # index_select copies first, so that overlap does no harm
        stack[:, :, start : start + len(slots)] = stack.index_select(2, torch.tensor(slots, device=stack.device))
