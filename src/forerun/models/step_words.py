"""The words of a step on their way to the device: written on the host, copied at once, in the order of the steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.kernels.row_paths import PathPlan
from forerun.kernels.triton.step_arrays import NO_TILE, Tile, row_start, write_piece
from forerun.models.attention.base import Layout

_STAGES = 4
"""Copies on the host: one is written while the device still reads those of the steps before."""


class StepWords:
    """Brings the words of a step (`kernels/triton/step_arrays.py`) to where the kernels read them.

    Args:
        target: [words] int64 on the device. All of its rows are made dead.
        base: the page that distances of pages are counted from.
    """

    def __init__(self, target: Tensor, base: Tensor) -> None:
        self._target, self._base = target, base.data_ptr()
        is_cuda = target.device.type == "cuda"
        self._stages = [torch.zeros(len(target), dtype=torch.int64, pin_memory=is_cuda) for _ in range(_STAGES)]
        self._copied: list[torch.cuda.Event] = []
        if is_cuda:
            self._copied = [torch.cuda.Event() for _ in range(_STAGES)]  # type: ignore[no-untyped-call]
        self._next = 0
        target[row_start("tile") : row_start("prefix")] = NO_TILE

    @staticmethod
    def plan_of(layout: Layout) -> PathPlan:
        """The plan of a forward, which the planner of this decoder has made."""
        assert isinstance(layout.plan, PathPlan)
        return layout.plan

    def check(self, layout: Layout, num_positions: int) -> None:
        """Refuse what would be read or written where nothing of the step lies.

        Raises:
            ValueError: positions beyond `num_positions`, or rows of a block, which see each other.
        """
        if layout.num_positions > num_positions:
            raise ValueError(
                f"a row at position {layout.num_positions - 1}, but rotations reach to {num_positions - 1}"
            )
        paths = self.plan_of(layout).paths
        if bool((paths.prefix > paths.slot + 1).any()):
            raise ValueError("rows of a block see each other, which these kernels do not compute")

    def send(self, layout: Layout, tiles: Sequence[Tile]) -> None:
        """Write one piece of a forward, and copy it. Token ids that lie on the device stay there."""
        index, self._next = self._next, (self._next + 1) % _STAGES
        if self._copied:
            self._copied[index].synchronize()
        stage = self._stages[index]
        is_here = layout.token_ids.device.type == "cpu"
        token_ids = layout.token_ids.numpy() if is_here else None
        count = write_piece(stage.numpy(), self.plan_of(layout), tiles, token_ids, self._base)
        self._target[:count].copy_(stage[:count], non_blocking=True)
        if self._copied:
            self._copied[index].record()
        if not is_here:
            first, end = tiles[0].first, tiles[-1].end
            start = row_start("token")
            self._target[start : start + end - first] = layout.token_ids[first:end]
