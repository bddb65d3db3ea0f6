"""Steps of a model captured as CUDA graphs and replayed: one launch for all kernels of all layers.

A captured graph reads and writes the addresses that it was captured with. So whatever changes from step to step is
written there before a replay, and all that the kernels use is held as long as the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from forerun.kernels.partition import PathPlan
from forerun.kernels.triton.step_arrays import NO_TILE, Tile, row_start, write_piece
from forerun.models.attention.base import Layout


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` current: PyTorch and Triton launch kernels, capture graphs and record events on the device that is
    current in the calling thread, whatever device the tensors lie on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class StepGraphs:
    """Sequences of kernels by key. On a CUDA device each is captured at its first use; elsewhere it runs directly, with
    the same results.

    All graphs of one model share one pool of memory, which no other model's may use: two graphs of one pool must not
    run at the same time. Capture the largest first, so that the others fit into the memory it leaves; on one stream,
    since memory of a pool is another's for every stream.

    Args:
        device: where the model computes; it is current whenever `run` is called.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_captured = device.type == "cuda"
        self._device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._is_captured else None
        self._stream: torch.cuda.Stream | None = None

    def run(self, key: Hashable, compute: Callable[[], None]) -> None:
        """Run `compute`. Each key stands for the same sequence of kernels at the same addresses."""
        if not self._is_captured:
            compute()
            return
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._captured(compute)
        graph.replay()

    def _captured(self, compute: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture `compute` after running it once: nothing may be compiled, loaded or allocated while kernels are
        recorded. The extra run changes nothing, since a step writes the same keys and values again."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # other threads may allocate meanwhile, for another model
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            compute()
        return graph


_STAGES = 4
"""Copies on the host: one is written while the device still reads those of the steps before."""


class StepInputBuffers:
    """Copies the integer arrays of a step (`kernels/triton/step_arrays.py`) to the device.

    Args:
        target: [words] int64 on the device. All of its rows are made dead.
        base: the page that distances of pages are counted from.
    """

    def __init__(self, target: Tensor, base: Tensor) -> None:
        self._target = target
        self._base = base.data_ptr()
        is_cuda = target.device.type == "cuda"
        self._stages = [torch.zeros(len(target), dtype=torch.int64, pin_memory=is_cuda) for _ in range(_STAGES)]
        self._copied = [torch.cuda.Event() for _ in range(_STAGES if is_cuda else 0)]  # type: ignore[no-untyped-call]
        self._next = 0
        target[row_start("tile") : row_start("prefix")] = NO_TILE

    @staticmethod
    def plan_of(layout: Layout) -> PathPlan:
        """Return the plan of a forward, which this decoder's planner made."""
        assert isinstance(layout.plan, PathPlan)
        return layout.plan

    def check(self, layout: Layout, num_positions: int) -> None:
        """Raise an error for rows that the kernels cannot compute.

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
        index = self._next
        self._next = (self._next + 1) % _STAGES
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
            first = tiles[0].first
            end = tiles[-1].end
            start = row_start("token")
            self._target[start : start + end - first] = layout.token_ids[first:end]
