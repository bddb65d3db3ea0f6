"""Steps of a model captured as CUDA graphs, and replayed: one launch for all kernels of all layers.

A captured graph reads and writes the addresses that it was captured with. So whatever changes from step to step is
written there before a replay, and all that the kernels use is held as long as the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext

import torch


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Where kernels are launched, graphs captured and events recorded: PyTorch and Triton do so on the device that is
    current, which every thread has of its own, whatever device the tensors lie on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class StepGraphs:
    """Sequences of kernels by key. On a CUDA device each is captured when it is first wanted; elsewhere it is run as it
    is, with the same results.

    All graphs of one model share one pool of memory, which no other model's may use: two graphs of one pool must not
    run at the same time. Capture the largest first, so that the others find room in what it has left; on one stream,
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
        """Do what `compute` does: each key stands for one and the same sequence of kernels at the same addresses."""
        if not self._is_captured:
            compute()
            return
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._captured(compute)
        graph.replay()

    def _captured(self, compute: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """What is compiled, loaded or allocated at the first call must not be while kernels are recorded, so that it is
        run once before. That changes nothing: a step writes the same keys and values again."""
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
