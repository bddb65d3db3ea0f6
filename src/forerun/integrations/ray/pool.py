"""A pool of workers on Ray; the jobs of a worker that dies go to others."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ray

from forerun.errors import ReplicaError
from forerun.integrations.ray.connect import to_forerun_error
from forerun.server.batch.files import ByteRange

_JOBS = 2
"""Jobs per worker at a time: while one ends, the other fills the batch."""
_MOST_DEATHS = 3
"""Workers that may die in one job before it fails: the job may be the cause."""


class Call(NamedTuple):
    """A running job."""

    job: ByteRange
    worker: int


class WorkerPool:
    """Workers, each an actor in a process of its own.

    Args:
        start: starts a worker; its model is loaded by its method `load`.
        call: starts a job at a worker and returns its generator of references; None if the job is done already.
    """

    def __init__(self, num_workers: int, start: Callable[[], Any], call: Callable[[Any, ByteRange], Any]) -> None:
        self._start = start
        self._call = call
        self._workers: dict[int, Any] = {}
        self._calls: dict[Any, Call] = {}
        self._lost: deque[ByteRange] = deque()
        self._deaths: Counter[ByteRange] = Counter()
        self._num_started = 0
        for _ in range(num_workers):
            self._add()

    def load(self) -> None:
        """Wait until all workers have loaded the model; those that die are replaced.

        Raises:
            ReplicaError: several have died.
            Exception: raised by a worker.
        """
        loading = {worker.load.remote(): number for number, worker in self._workers.items()}
        num_deaths = 0
        while loading:
            (ready, *_), _ = ray.wait([*loading], num_returns=1)
            number = loading.pop(ready)
            try:
                ray.get(ready)
            except Exception as error:
                failure = to_forerun_error(error)
                num_deaths = num_deaths + 1
                if not isinstance(failure, ReplicaError):
                    raise failure from None
                if num_deaths == _MOST_DEATHS:
                    raise ReplicaError(
                        f"{_MOST_DEATHS} workers have ended while they loaded the model. If memory is short, give "
                        "fewer --replicas."
                    ) from None
                worker = self._replace(number)
                loading[worker.load.remote()] = self._num_started - 1

    def run(self, jobs: Iterator[ByteRange]) -> Iterator[Any]:
        """Yield the results of the jobs, in the order of their completion.

        Raises:
            ReplicaError: several workers have died in the same job.
            Exception: raised by a worker.
        """
        self._hand_out(jobs)
        while self._calls:
            (ready, *_), _ = ray.wait([*self._calls], num_returns=1, fetch_local=False)
            try:
                given = ray.get(next(ready))
            except StopIteration:
                del self._calls[ready]
            except Exception as error:
                self._failed(ready, error)
            else:
                yield given
            self._hand_out(jobs)

    def _hand_out(self, jobs: Iterator[ByteRange]) -> None:
        """Give jobs to workers with fewer than _JOBS."""
        while True:
            busy = Counter(call.worker for call in self._calls.values())
            free = min(self._workers, key=lambda number: busy[number])
            if busy[free] >= _JOBS:
                return
            job = self._lost.popleft() if self._lost else next(jobs, None)
            if job is None:
                return
            begun = self._call(self._workers[free], job)
            if begun is not None:
                self._calls[begun] = Call(job, free)

    def _failed(self, ready: Any, error: Exception) -> None:
        """Requeue the jobs of a dead worker and replace it; raise other errors."""
        failure = to_forerun_error(error)
        if not isinstance(failure, ReplicaError):
            raise failure from None
        gone = self._calls[ready].worker
        for each in [each for each, call in self._calls.items() if call.worker == gone]:
            job = self._calls.pop(each).job
            self._deaths[job] += 1
            if self._deaths[job] == _MOST_DEATHS:
                raise ReplicaError(
                    f"{_MOST_DEATHS} workers have ended, one after another, in the same part of the work. The "
                    "answers so far are kept, and the same command resumes. If memory is short, give fewer --replicas."
                )
            self._lost.append(job)
        self._replace(gone)

    def _replace(self, gone: int) -> Any:
        """Start a worker in place of a dead one, and return it."""
        del self._workers[gone]
        return self._add()

    def _add(self) -> Any:
        worker = self._workers[self._num_started] = self._start()
        self._num_started += 1
        return worker
