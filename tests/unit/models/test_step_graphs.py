"""CUDA graphs of steps on a fake device: what is captured, on which stream, into which pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from forerun.models.fused import cuda_graphs as step_graphs
from forerun.models.fused.cuda_graphs import StepGraphs, on_device

CUDA = torch.device("cuda", 1)


class Recorder:
    """In the place of torch.cuda."""

    def __init__(self) -> None:
        self.record: list[tuple[Any, ...]] = []
        self.streams: list[Recorder.Stream] = []
        self.now: Any = None

    class Stream:
        def wait_stream(self, other: object) -> None:
            pass

    class CUDAGraph:
        replays = 0

        def replay(self) -> None:
            self.replays += 1

    def Stream_(self, device: torch.device) -> Stream:
        assert device == CUDA
        self.streams.append(Recorder.Stream())
        return self.streams[-1]

    def current_stream(self, device: torch.device) -> Stream:
        assert device == CUDA
        return Recorder.Stream()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.now = ("warm up", stream)
        yield
        self.now = None

    @contextmanager
    def graph(self, graph: CUDAGraph, pool: object, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.now = ("capture", stream, pool)
        yield
        self.now = None


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made, cuda = Recorder(), step_graphs.torch.cuda
    monkeypatch.setattr(cuda, "Stream", made.Stream_)
    monkeypatch.setattr(cuda, "graph_pool_handle", object)
    for name in ("CUDAGraph", "current_stream", "stream", "graph"):
        monkeypatch.setattr(cuda, name, getattr(made, name))
    return made


def test_each_is_run_once_before_it_is_captured_on_one_stream_into_one_pool(recorder: Recorder) -> None:
    graphs, computed = StepGraphs(CUDA), []
    for key in ("large", "small", "large", "large"):
        graphs.run(key, lambda key=key: computed.append((key, *recorder.now)))  # type: ignore[misc]
    assert [each[:2] for each in computed] == [
        (key, how) for key in ("large", "small") for how in ("warm up", "capture")
    ]
    assert len(recorder.streams) == 1 and {each[2] for each in computed} == set(recorder.streams)
    assert len({each[3] for each in computed if each[1] == "capture"}) == 1
    replays = {key: graph.replays for key, graph in graphs._graphs.items()}  # type: ignore[attr-defined]
    assert replays == {"large": 3, "small": 1}


def test_models_have_pools_of_their_own(recorder: Recorder) -> None:
    assert StepGraphs(CUDA)._pool is not StepGraphs(CUDA)._pool


def test_elsewhere_nothing_is_captured() -> None:
    graphs, computed = StepGraphs(torch.device("cpu")), []
    for _ in range(3):
        graphs.run("key", lambda: computed.append(1))
    assert len(computed) == 3


def test_the_device_of_a_model_becomes_current(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[object] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or "entered")
    assert on_device(CUDA) == "entered" and entered == [CUDA]
    with on_device(torch.device("cpu")):
        assert entered == [CUDA]
