"""Batches and answers by workers on Ray: a file by ranges of bytes, other requests by handfuls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forerun.batch.journal import Journal
from forerun.batch.lines import BatchFile
from forerun.batch.ranges import ByteRange, ranges_of
from forerun.cluster.connect import connected
from forerun.cluster.options import RayOptions
from forerun.cluster.plan import gpus_of, threads_of
from forerun.cluster.worker import Worker
from forerun.config import SamplingParams
from forerun.engine import LLM, Choice
from forerun.errors import PromptError, SamplingError

if TYPE_CHECKING:
    from forerun.cluster.pool import Pool
    from forerun.train.data.answer_stages import Computing

K = TypeVar("K")


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

    parts = ranges_of(requests, options.replicas)
    with _pool(options, worker, begin) as pool:
        loaded()
        num_tokens = num_cached = 0
        for answered in pool.run(lambda: next(parts, None)):
            num_tokens, num_cached = num_tokens + answered.num_tokens, num_cached + answered.num_cached_tokens
            journal.add(answered.index, answered.answer)
            told(num_tokens, num_cached)


@dataclass(slots=True, eq=False)
class _Handful:
    """Some requests, by number: those that are not answered."""

    left: dict[int, tuple[list[int], SamplingParams]]


@contextmanager
def computing_on_ray(options: RayOptions, worker: Mapping[str, Any]) -> Iterator[Computing]:
    """What takes the place of `train.data.many_requests.compute`: the LLM stays idle.

    Raises:
        ForerunError: as `answer_on_ray`.
    """

    def begin(handle: Any, handful: _Handful) -> Any:
        if not handful.left:
            return None
        return handle.choices.options(num_returns="streaming").remote([*handful.left.items()])

    def compute(
        llm: LLM, waiting: deque[K], request: Callable[[K], tuple[list[int], SamplingParams]]
    ) -> Iterator[tuple[K, Choice | PromptError | SamplingError]]:
        keys: dict[int, K] = {}
        handfuls: dict[int, _Handful] = {}
        refused: deque[tuple[K, PromptError | SamplingError]] = deque()

        def more() -> _Handful | None:
            handful = _Handful({})
            while waiting and len(handful.left) < llm.engine.config.max_batch:
                key = waiting.popleft()
                try:
                    handful.left[len(keys)] = request(key)
                except (PromptError, SamplingError) as error:
                    refused.append((key, error))
                    continue
                handfuls[len(keys)] = handful
                keys[len(keys)] = key
            return handful if handful.left else None

        while waiting or refused:
            for number, choice in pool.run(more):
                del handfuls.pop(number).left[number]
                yield keys[number], choice
            while refused:
                yield refused.popleft()

    with _pool(options, worker, begin) as pool:
        yield compute


@contextmanager
def _pool(options: RayOptions, worker: Mapping[str, Any], begin: Callable[[Any, Any], Any]) -> Iterator[Pool[Any]]:
    """Workers that have loaded their models."""
    threads = threads_of(options)
    with connected(options):
        import ray

        from forerun.cluster.pool import Pool

        actor = ray.remote(num_cpus=threads, num_gpus=gpus_of(worker["llm"]), max_concurrency=4, max_restarts=0)(Worker)
        pool: Pool[Any] = Pool(options.replicas, lambda: actor.remote(**worker, threads=threads), begin)
        pool.load()
        yield pool
