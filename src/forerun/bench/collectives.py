"""What it costs that several ranks compute one model: the time of a gather by its size, and a forward of a Llama by so
many ranks beside one process with as many threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from forerun.bench.measure import Interval, bootstrap, ratio
from forerun.bench.report import Columns
from forerun.models import LanguageModel, Rows, load_model
from forerun.models.sharded import ShardedModel, load_sharded_model
from forerun.ranks.joining import join_by_file
from forerun.ranks.spawned import Spawned

MODULE = "forerun.bench.collectives_rank"
_WARMUP = 10


@dataclass(frozen=True, slots=True)
class GatherRow:
    """Gathers of one size.

    Attributes:
        ranks: among which they were. rows, width: of the part of each rank, in float32.
        seconds: of a gather. p99: their 99th percentile.
    """

    ranks: int
    rows: int
    width: int
    seconds: Interval
    p99: float

    @property
    def nbytes(self) -> int:
        """Of a rank's part."""
        return 4 * self.rows * self.width


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """One forward of a model by several ranks and by one process.

    Attributes:
        seconds: by the ranks. one: by one process with as many threads. gathering: of `seconds`, in gathers.
        whole, computing: seconds over `one`, with gathers and without.
        gathers: of a forward.
    """

    rows: int
    seconds: Interval
    one: Interval
    gathering: Interval
    whole: Interval
    computing: Interval
    gathers: int


GATHERS: Columns[GatherRow] = {
    "rows x width": lambda row: f"{row.rows} x {row.width}",
    "KiB a rank": lambda row: f"{row.nbytes / 1024:.0f}",
    "median ms": lambda row: f"{_milliseconds(row.seconds):.3f}",
    "p99 ms": lambda row: f"{1000 * row.p99:.3f}",
}
FORWARDS: Columns[ForwardRow] = {
    "rows": lambda row: str(row.rows),
    "ranks ms": lambda row: f"{1000 * row.seconds.median:.2f}",
    "of it gathers": lambda row: f"{1000 * row.gathering.median:.2f}",
    "one process ms": lambda row: f"{1000 * row.one.median:.2f}",
    "without gathers / one": lambda row: f"{row.computing:.2f}",
    "whole / one": lambda row: f"{row.whole:.2f}",
    "gathers": lambda row: str(row.gathers),
}


def measure(ranks: int, rows: Sequence[int], width: int, rounds: int) -> list[GatherRow]:
    """Time gathers of rows of float32, in which every rank gets the parts of all.

    Raises:
        RankError: a rank could not start, or is lost.
    """
    spawned = Spawned(MODULE, ranks, {"count": ranks, "rows": list(rows), "width": width, "rounds": rounds + _WARMUP})
    try:
        peers = join_by_file(spawned.store, 0, ranks, spawned.check)
        found = []
        for count in rows:
            part, seconds = torch.randn(count, width), []
            for _ in range(rounds + _WARMUP):
                start = perf_counter()
                peers.exchange(part)
                seconds.append(perf_counter() - start)
            timed = seconds[_WARMUP:]
            found.append(GatherRow(ranks, count, width, bootstrap(timed), sorted(timed)[int(0.99 * len(timed))]))
        return found
    finally:
        spawned.end()


def measure_forwards(
    folder: str | Path,
    dtype: str,
    ranks: int,
    rows: Sequence[int],
    prefix: int,
    rounds: int,
    say: Callable[[str], None],
) -> list[ForwardRow]:
    """Time forwards of a model by several ranks, of one thread each, and by one process of as many threads, in turn.

    Raises:
        ConfigError, ModelLoadError, RankError: as `load_sharded_model`.
    """
    threads = torch.get_num_threads()
    say(f"loading {dtype} on {ranks} ranks")
    torch.set_num_threads(ranks)
    sharded = load_sharded_model(folder, dtype, ranks)
    try:
        one = load_model(folder, dtype)
        return [_forwards(sharded, one, count, prefix, rounds, ranks) for count in rows]
    finally:
        sharded.close()
        torch.set_num_threads(threads)


def _forwards(sharded: ShardedModel, one: LanguageModel, rows: int, prefix: int, rounds: int, ranks: int) -> ForwardRow:
    by_ranks, gathering, by_one = [], [], []
    step_sharded, step_one = _step(sharded, rows, prefix), _step(one, rows, prefix)
    gathers = 0
    for number in range(rounds + _WARMUP):
        torch.set_num_threads(1)
        moved, before = sharded.moved.gathers, sharded.moved.seconds
        seconds = step_sharded()
        if number >= _WARMUP:
            by_ranks.append(seconds)
            gathering.append(sharded.moved.seconds - before)
            gathers = sharded.moved.gathers - moved if not gathers else min(gathers, sharded.moved.gathers - moved)
        torch.set_num_threads(ranks)
        seconds = step_one()
        if number >= _WARMUP:
            by_one.append(seconds)
    computing = [all_of_it - part for all_of_it, part in zip(by_ranks, gathering, strict=True)]
    return ForwardRow(
        rows,
        bootstrap(by_ranks),
        bootstrap(by_one),
        bootstrap(gathering),
        ratio(by_ranks, by_one),
        ratio(computing, by_one),
        gathers,
    )


def _step(model: LanguageModel, rows: int, prefix: int) -> Callable[[], float]:
    """The seconds of a forward of so many rows after a prefix."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.vocab_size, (prefix + rows,), generator=generator).tolist()
    cache = model.new_cache()
    model.forward([Rows(cache, tokens[:prefix], num_logits=0)])
    cache.commit(range(prefix))

    def step() -> float:
        start = perf_counter()
        model.forward([Rows(cache, tokens[prefix:])])
        seconds = perf_counter() - start
        cache.drop()
        return seconds

    return step


def _milliseconds(seconds: Interval) -> Interval:
    low, high = (None if bound is None else 1000 * bound for bound in (seconds.low, seconds.high))
    return Interval(1000 * seconds.median, low, high)
