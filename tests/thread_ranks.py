"""Ranks as threads of one process, whose messages go through queues: all of tensor parallelism but the processes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.models.sharded import loading
from forerun.models.sharded.loading import follow, lead, plan_of
from forerun.models.sharded.model import ShardedModel
from forerun.ranks.peers import Peers

Place = tuple[int, int, int]
"""From, to, tag."""


class _Sent:
    def wait(self, timeout: timedelta) -> None:
        """It lies in the queue."""


class _Receiving:
    def __init__(self, queue: Queue[Tensor | None], target: Tensor) -> None:
        self._queue, self._target = queue, target

    def wait(self, timeout: timedelta) -> None:
        try:
            data = self._queue.get(timeout=timeout.total_seconds())
        except Empty:
            raise RuntimeError("Timed out waiting for recv operation to complete") from None
        if data is None:
            raise RuntimeError("Connection closed by peer")
        assert data.shape == self._target.shape
        assert data.dtype == self._target.dtype
        self._target.copy_(data)


class QueueBackend:
    """The part of a process group that ranks may use: bytes from one to another. Whatever adds is refused."""

    def __init__(self, queues: dict[Place, Queue[Tensor | None]], rank: int, count: int) -> None:
        self.sent: Counter[int] = Counter()
        self._queues, self._rank, self._count = queues, rank, count

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Sent:
        (data,) = tensors
        assert data.is_contiguous()
        self.sent[tag] += 1
        self._queues[self._rank, to, tag].put(data.clone())
        return _Sent()

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> _Receiving:
        return _Receiving(self._queues[sender, self._rank, tag], tensors[0])

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not among what ranks may ask of each other")


def connected(count: int, timeout: float = 20.0) -> list[Peers]:
    """Ranks that are connected."""
    places = [(a, b, tag) for a in range(count) for b in range(count) for tag in (1, 2)]
    queues: dict[Place, Queue[Tensor | None]] = {place: Queue() for place in places}
    return [Peers(QueueBackend(queues, rank, count), rank, count, timeout) for rank in range(count)]


@contextmanager
def sharded(
    name: str | Path, dtype: str = "float32", count: int = 2, quantize: str | None = None
) -> Iterator[ShardedModel]:
    """The leader's model, whose other ranks are threads.

    They read their weights one after another: Transformers sets torch's default number format for all threads then.
    """
    peers = connected(count)
    reading = threading.Lock()

    def alone(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            with reading:
                return function(*arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for part in ("build", "embeddings"):
            patch.setattr(loading, part, alone(getattr(loading, part)))
        yield from _running(name, dtype, quantize, peers)


def _running(name: str | Path, dtype: str, quantize: str | None, peers: list[Peers]) -> Iterator[ShardedModel]:
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            follow(plan_of(name, dtype, quantize), peers[rank])
        except BaseException as error:
            failures.append(error)
            reason = f"{type(error).__name__}: {error}"
            peers[0].reason_of = lambda _: reason
            for tag in (1, 2):  # as a connection that is closed
                peers[rank]._backend._queues[rank, 0, tag].put(None)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(1, len(peers))]
    for thread in threads:
        thread.start()
    model = lead(plan_of(name, dtype, quantize), peers[0], None, name)
    try:
        yield model
    finally:
        model.close()
        is_lost = peers[0].lost is not None
        for rank in range(1, len(peers) if is_lost else 1):  # as when the leader's process ends
            for tag in (1, 2):
                peers[0]._backend._queues[0, rank, tag].put(None)
        for thread in threads:
            thread.join(20)
        assert is_lost or not failures
