"""`forerun bench engine`: the engine's time outside forwards, measured without a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from forerun.bench.report import Report, Table
from forerun.cli import options
from forerun.cli.bench.shared import JsonFile, begin, print_report, say, whole_numbers
from forerun.cli.flags import Flags, with_flags
from forerun.fields import option


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Which steps are timed."""

    vocab_sizes: str = option("4096,49152", "Sizes of the vocabulary, with commas between them.", metavar="INT,...")
    num_draft_tokens: int = option(4, "K of the steps that draft.", low=1)
    rounds: int = option(200, "Steps of each kind whose sampling is timed.", low=1)
    steps: int = option(500, "Steps in each of five rounds whose planning is timed.", low=1)


@with_flags
def engine(
    *,
    timed: Annotated[EngineOptions, Flags()],
    threads: options.Threads = None,
    json: JsonFile = None,
    markdown: options.Markdown = False,
) -> None:
    """The engine's time outside forwards, per step: choosing K, distributions, drawing and verification."""
    vocab_sizes = whole_numbers(timed.vocab_sizes, "--vocab-sizes")
    watch = begin(threads, json)
    from forerun.bench import planning_time, sampling_time

    say("timing how K is chosen")
    planning = planning_time.measure(timed.steps)
    sampling = sampling_time.measure(vocab_sizes, timed.num_draft_tokens, timed.rounds, say)
    tables = [
        Table.of("Choosing K", planning_time.COLUMNS, planning),
        Table.of("Sampling and verification", sampling_time.COLUMNS, sampling),
    ]
    print_report(Report("engine", tables, details={"planning": planning, "sampling": sampling}), watch, json, markdown)
