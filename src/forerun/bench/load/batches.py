"""Plain decoding by batch size: tokens per second over those of one sequence, and the time outside forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from forerun.bench.load.asks import Ask
from forerun.bench.load.serving import Clients
from forerun.bench.measure import Interval, bootstrap, interleave, ratio
from forerun.bench.report import Columns
from forerun.config import SamplingParams
from forerun.engine import LLM


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One batch size; medians and intervals over the rounds.

    Attributes:
        batch: sequences.
        speed: tokens per second in steps that compute no prompt, the engine's and its driver's work included.
        over_one: its ratio to that of the first batch size in the same round.
        step: milliseconds of a step.
        outside: share of the step that is not in the target's forward.
    """

    batch: int
    speed: Interval
    over_one: Interval
    step: float
    outside: Interval


COLUMNS: Columns[BatchRow] = {
    "batch": lambda row: str(row.batch),
    "tokens/s": lambda row: f"{row.speed:.1f}",
    "over the first": lambda row: f"{row.over_one:.2f}",
    "step ms": lambda row: f"{row.step:.2f}",
    "outside forwards": lambda row: f"{row.outside:.3f}",
}


@dataclass(frozen=True, slots=True)
class _Run:
    """Seconds and tokens of the steps that computed no prompt, and the seconds of their forwards."""

    steps: int
    tokens: int
    seconds: float
    forwards: float


def measure(
    plain: LLM,
    prompts: Sequence[Sequence[int]],
    batches: Sequence[int],
    max_tokens: int,
    rounds: int,
    say: Callable[[str], None] = lambda _: None,
) -> list[BatchRow]:
    """A row per batch size, interleaved.

    Args:
        prompts: as many as the largest batch, all of one length.
        max_tokens: of every answer.
    """
    say(f"plain decoding at batches of {', '.join(map(str, batches))}")
    asks = [Ask(list(prompt), max_tokens) for prompt in prompts]
    methods = {str(batch): lambda batch=batch: _run(plain, asks[:batch]) for batch in batches}
    runs = interleave(methods, rounds)
    values = [[each.value for each in runs[str(batch)]] for batch in batches]
    speeds = [[run.tokens / run.seconds for run in each] for each in values]
    return [
        BatchRow(
            batch,
            bootstrap(speed),
            ratio(speed, speeds[0]),
            1e3 * bootstrap([run.seconds / run.steps for run in each]).median,
            bootstrap([1 - run.forwards / run.seconds for run in each]),
        )
        for batch, each, speed in zip(batches, values, speeds, strict=True)
    ]


def _run(plain: LLM, asks: Sequence[Ask]) -> _Run:
    clients = Clients(plain.engine, SamplingParams(temperature=0, ignore_eos=True), "batch", streamed=False)
    for ask in asks:
        clients.send(ask)
    steps = tokens = 0
    seconds = forwards = 0.0
    while clients.live:
        started = perf_counter()
        step = clients.step()
        took = perf_counter() - started
        if step.num_tokens == step.num_rows == len(asks):  # no prompt, and all of them
            steps, tokens = steps + 1, tokens + step.num_tokens
            seconds, forwards = seconds + took, forwards + step.time_target
    return _Run(steps, tokens, seconds, forwards)
