"""A long prompt that arrives among streams: how long their clients wait between tokens meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from forerun.bench.load.asks import Ask
from forerun.bench.load.serving import Clients, Stream, quantile
from forerun.bench.measure import Interval, bootstrap
from forerun.bench.report import Columns
from forerun.config import SamplingParams
from forerun.engine import LLM

BEFORE = 0.25
"""Share of their tokens that the streams have when the prompt arrives."""
ANSWER = 8


@dataclass(frozen=True, slots=True)
class ArrivalRow:
    """Times in milliseconds; medians and intervals over the rounds.

    Attributes:
        streams: how many.
        prompt: tokens of the prompt that arrives.
        median: time between tokens of a stream without it.
        p99: the 99th percentile of a stream's times between tokens in the run with it: the worst stream's.
        p99_over_median: that over the same stream's median without it: the worst stream's.
        meanwhile: the same, of the times that end between the prompt's arrival and its first token.
        longest: the longest time between tokens of any stream over its median without it.
        first_token: of the prompt that arrives.
    """

    streams: int
    prompt: int
    median: float
    p99: float
    p99_over_median: Interval
    meanwhile: Interval
    longest: Interval
    first_token: float


COLUMNS: Columns[ArrivalRow] = {
    "streams": lambda row: str(row.streams),
    "prompt": lambda row: str(row.prompt),
    "median without ms": lambda row: f"{row.median:.1f}",
    "worst p99 with ms": lambda row: f"{row.p99:.1f}",
    "p99 over median": lambda row: f"{row.p99_over_median:.2f}",
    "until its first token": lambda row: f"{row.meanwhile:.2f}",
    "longest": lambda row: f"{row.longest:.2f}",
    "its first token ms": lambda row: f"{row.first_token:.0f}",
}


def measure(
    plain: LLM,
    prompts: Sequence[Sequence[int]],
    arriving: Sequence[Sequence[int]],
    max_tokens: int,
    say: Callable[[str], None] = lambda _: None,
) -> list[ArrivalRow]:
    """One row.

    Args:
        prompts: of the streams.
        arriving: a long prompt for each round, and one more to warm up.
        max_tokens: of every stream.
    """
    say(f"a prompt of {len(arriving[0])} tokens arrives among {len(prompts)} streams")
    found: dict[str, list[float]] = {name: [] for name in ("median", "p99", "ratio", "meanwhile", "longest", "first")}
    for number, long in enumerate(arriving):
        without, _ = _run(plain, prompts, max_tokens, None)
        streams, late = _run(plain, prompts, max_tokens, Ask(list(long), ANSWER))
        if not number:
            continue
        assert late is not None
        assert late.first_token is not None
        medians = [quantile(stream.waits, 0.5) for stream in without]
        p99 = [quantile(stream.waits, 0.99) for stream in streams]
        end = late.sent + late.first_token
        during = [quantile(_waits_within(stream, late.sent, end), 0.99) for stream in streams]
        longest = [max(stream.waits) for stream in streams]
        found["median"].append(1e3 * quantile(medians, 0.5))
        found["p99"].append(1e3 * max(p99))
        found["first"].append(1e3 * late.first_token)
        for name, values in (("ratio", p99), ("meanwhile", during), ("longest", longest)):
            found[name].append(max(value / median for value, median in zip(values, medians, strict=True)))
    summary = {name: bootstrap(values) for name, values in found.items()}
    return [
        ArrivalRow(
            len(prompts),
            len(arriving[0]),
            summary["median"].median,
            summary["p99"].median,
            summary["ratio"],
            summary["meanwhile"],
            summary["longest"],
            summary["first"].median,
        )
    ]


def _run(
    plain: LLM, prompts: Sequence[Sequence[int]], max_tokens: int, arriving: Ask | None
) -> tuple[list[Stream], Stream | None]:
    """The streams to their end, and what arrived."""
    clients = Clients(plain.engine, SamplingParams(temperature=0, ignore_eos=True), "stream")
    streams = [clients.send(Ask(list(prompt), max_tokens)) for prompt in prompts]
    late: Stream | None = None
    while not all(stream.done for stream in streams):
        if arriving is not None and late is None and clients.num_tokens >= BEFORE * max_tokens * len(streams):
            late = clients.send(arriving)
        clients.step()
    clients.finish()
    return streams, late


def _waits_within(stream: Stream, start: float, end: float) -> list[float]:
    """Seconds between arrivals of which the later lies within."""
    times = [when for when, _ in stream.arrivals]
    return [now - before for before, now in pairwise(times) if start < now <= end]
