"""`forerun bench collectives`: what a gather among ranks costs, and a forward that several ranks compute."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated

from forerun.bench.report import Report, Table
from forerun.cli import options
from forerun.cli.bench.shared import JsonFile, begin, print_report, say, whole_numbers
from forerun.cli.flags import Flags, with_flags
from forerun.fields import option


@dataclass(frozen=True, slots=True)
class CollectivesOptions:
    """What is timed."""

    ranks: int = option(2, "Processes on this machine.", low=2)
    rows: str = option("1,4,8,64", "Rows of a gather, with commas between them.", metavar="INT,...")
    width: int = option(1024, "Numbers of a row, in float32.", low=1)
    rounds: int = option(500, "Gathers of each size.", low=10)
    forward: bool = option(False, "Time forwards too, by the ranks and by one process of as many threads.")
    model: str | None = option(
        None, "The model of these, a folder or hub id.", default_text="a random Llama of 197 M parameters"
    )
    forward_rows: str = option("1,4,8", "Rows of a forward, with commas between them.", metavar="INT,...")
    dtype: str = option("bfloat16", "Number format of these.")
    prefix: int = option(256, "Cached positions before the new rows.", low=1)
    forward_rounds: int = option(20, "Forwards of each size.", low=2)


@with_flags
def collectives(
    *,
    timed: Annotated[CollectivesOptions, Flags()],
    json: JsonFile = None,
    markdown: options.Markdown = False,
) -> None:
    """What it costs that several processes compute one model: gathers, and a forward beside one process."""
    rows = whole_numbers(timed.rows, "--rows")
    forward_rows = whole_numbers(timed.forward_rows, "--forward-rows")
    watch = begin(None, json)
    from forerun.bench import collectives as bench
    from forerun.bench.random_llama import random_llama
    from forerun.bench.recorded_parts import gather_figures
    from forerun.bench.reference import quieten

    quieten()
    say(f"timing gathers among {timed.ranks} ranks")
    gathers = bench.measure(timed.ranks, rows, timed.width, timed.rounds)
    tables = [Table.of(f"A gather among {timed.ranks} ranks, {timed.rounds} rounds", bench.GATHERS, gathers)]
    forwards: list[bench.ForwardRow] = []
    if timed.forward:
        with ExitStack() as stack:
            folder = timed.model or stack.enter_context(random_llama())
            forwards = bench.measure_forwards(
                folder, timed.dtype, timed.ranks, forward_rows, timed.prefix, timed.forward_rounds, say
            )
        title = f"A forward in {timed.dtype} by {timed.ranks} ranks of one thread and by one process of as many"
        tables.append(Table.of(f"{title}, {timed.forward_rounds} rounds", bench.FORWARDS, forwards))
    settings = {"ranks": timed.ranks, "width": timed.width, "rounds": timed.rounds}
    report = Report("collectives", tables, settings=settings, figures=gather_figures(gathers, forwards))
    print_report(report, watch, json, markdown)
