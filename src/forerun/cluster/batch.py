"""`forerun batch --ray`: ranges of the file answered by workers, and every answer brought into the journal here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forerun.batch.journal import Journal
from forerun.batch.lines import BatchFile
from forerun.batch.ranges import ByteRange, ranges_of
from forerun.cluster.connect import connected
from forerun.cluster.options import RayOptions
from forerun.cluster.plan import threads_of
from forerun.cluster.worker import Worker


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
    threads = threads_of(options)
    with connected(options):
        import ray

        from forerun.cluster.pool import Pool

        gpus = int(str(worker["llm"].get("device", "cpu")).startswith("cuda"))
        actor = ray.remote(num_cpus=threads, num_gpus=gpus, max_concurrency=4, max_restarts=0)(Worker)

        def begin(handle: Any, part: ByteRange) -> Any:
            done = frozenset(index for index in range(part.first, part.first + part.count) if journal.has(index))
            if len(done) == part.count:
                return None
            return handle.answers.options(num_returns="streaming").remote(str(source.resolve()), part, done)

        pool = Pool(options.replicas, lambda: actor.remote(**worker, threads=threads), begin)
        pool.load()
        loaded()
        num_tokens = num_cached = 0
        for answered in pool.run(ranges_of(requests, options.replicas)):
            num_tokens, num_cached = num_tokens + answered.num_tokens, num_cached + answered.num_cached_tokens
            journal.add(answered.index, answered.answer)
            told(num_tokens, num_cached)
