"""Batches by workers on Ray, each for ranges of the file of requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forerun.engine import LLM, EngineThread
from forerun.integrations.ray.connect import connected
from forerun.integrations.ray.plan import RayOptions, gpus_of, threads_of
from forerun.server.batch.files import BatchJournal, ByteRange, ranges_of, requests_in
from forerun.server.batch.lines import BatchFile
from forerun.server.batch.run import BatchRun

if TYPE_CHECKING:
    from forerun.integrations.ray.pool import WorkerPool


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """One answer, with the tokens computed since the previous one of its range."""

    index: int
    answer: dict[str, Any]
    num_tokens: int
    num_cached_tokens: int


class RayWorker:
    """An actor that answers the requests of ranges of a file with its model.

    Args:
        model, drafter, llm: of `LLM`.
        threads: of torch.
        name, seed: of `BatchRun`.
    """

    def __init__(
        self, model: str, drafter: str, llm: Mapping[str, Any], threads: int, name: str, seed: int | None
    ) -> None:
        self._of_model = (model, drafter, {**llm})
        self._threads = threads
        self._name = name
        self._seed = seed
        self._loaded: tuple[LLM, EngineThread] | None = None
        self._loading = threading.Lock()

    def load(self) -> None:
        """Load the model, once. Raises as `LLM`."""
        self._model()

    def _model(self) -> tuple[LLM, EngineThread]:
        with self._loading:
            if self._loaded is None:
                torch.set_num_threads(self._threads)
                model, drafter, settings = self._of_model
                llm = LLM(model, drafter=drafter, **settings)
                self._loaded = llm, EngineThread(llm.shared)
            return self._loaded

    def answers(self, path: str, part: ByteRange, done: frozenset[int]) -> Iterator[BatchAnswer]:
        """Yield the answers to a range's requests without those that are done. Raises ConfigError as `requests_in`."""
        llm, thread = self._model()
        run = BatchRun(llm, thread, self._name, self._seed)
        missing = requests_in(Path(path), part, lambda index: index not in done, self._name, llm.target.context_length)
        num_tokens = num_cached = 0
        for index, answer in run.answers(missing):
            yield BatchAnswer(index, answer, run.num_tokens - num_tokens, run.num_cached_tokens - num_cached)
            num_tokens = run.num_tokens
            num_cached = run.num_cached_tokens


def answer_on_ray(
    source: Path,
    requests: BatchFile,
    journal: BatchJournal,
    worker: Mapping[str, Any],
    options: RayOptions,
    *,
    on_loaded: Callable[[], None],
    on_answer: Callable[[int, int], None],
) -> None:
    """Compute the answers that are not in the journal, and add them to it.

    Args:
        worker: arguments of `RayWorker` but the threads.
        on_loaded: called when the models are loaded.
        on_answer: called after each answer, with the numbers of generated and of cached prompt tokens so far.

    Raises:
        ConfigError: as `connected`; a worker cannot read the file.
        ForerunError: a worker cannot load the model.
        ReplicaError: several workers have ended in the same range.
    """

    def begin(handle: Any, part: ByteRange) -> Any:
        done = frozenset(index for index in range(part.first, part.first + part.count) if journal.has(index))
        if len(done) == part.count:
            return None
        return handle.answers.options(num_returns="streaming").remote(str(source.resolve()), part, done)

    with _pool(options, worker, begin) as pool:
        on_loaded()
        num_tokens = num_cached = 0
        for answered in pool.run(ranges_of(requests, options.replicas)):
            num_tokens = num_tokens + answered.num_tokens
            num_cached = num_cached + answered.num_cached_tokens
            journal.add(answered.index, answered.answer)
            on_answer(num_tokens, num_cached)


@contextmanager
def _pool(options: RayOptions, worker: Mapping[str, Any], begin: Callable[[Any, Any], Any]) -> Iterator[WorkerPool]:
    """Start workers and yield their pool when they have loaded their models."""
    threads = threads_of(options)
    with connected(options):
        import ray

        from forerun.integrations.ray.pool import WorkerPool

        resources = {"num_cpus": threads, "num_gpus": gpus_of(worker["llm"])}
        actor = ray.remote(**resources, max_concurrency=4, max_restarts=0)(RayWorker)
        pool = WorkerPool(options.replicas, lambda: actor.remote(**worker, threads=threads), begin)
        pool.load()
        yield pool
