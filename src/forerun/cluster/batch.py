"""Batches by workers on Ray: a file by ranges of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.batch.journal import Journal
from forerun.batch.lines import BatchFile
from forerun.batch.ranges import ByteRange, ranges_of
from forerun.cluster.connect import connected
from forerun.cluster.options import RayOptions
from forerun.cluster.plan import gpus_of, threads_of
from forerun.cluster.worker import Worker

if TYPE_CHECKING:
    from forerun.cluster.pool import Pool


def answer_on_ray(
    source: Path,
    requests: BatchFile,
    journal: Journal,
    worker: Mapping[str, Any],
    options: RayOptions,
    *,
    loaded: Callable[[], None],
    told: Callable[[int, int], None],
) -> None:
    """Bring the answers that the journal lacks into it.

    Args:
        worker: arguments of `Worker` but the threads.
        loaded: called when the models are loaded.
        told: called after each answer, with the tokens generated and those of prompts found in memory so far.

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
        loaded()
        num_tokens = num_cached = 0
        for answered in pool.run(ranges_of(requests, options.replicas)):
            num_tokens, num_cached = num_tokens + answered.num_tokens, num_cached + answered.num_cached_tokens
            journal.add(answered.index, answered.answer)
            told(num_tokens, num_cached)


@contextmanager
def _pool(options: RayOptions, worker: Mapping[str, Any], begin: Callable[[Any, Any], Any]) -> Iterator[Pool]:
    """Workers that have loaded their models."""
    threads = threads_of(options)
    with connected(options):
        import ray

        from forerun.cluster.pool import Pool

        actor = ray.remote(num_cpus=threads, num_gpus=gpus_of(worker["llm"]), max_concurrency=4, max_restarts=0)(Worker)
        pool = Pool(options.replicas, lambda: actor.remote(**worker, threads=threads), begin)
        pool.load()
        yield pool
