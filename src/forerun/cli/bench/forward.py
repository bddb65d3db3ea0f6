"""`forerun bench forward`: the time of one target forward of K rows."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated

from forerun.bench.report import Report
from forerun.cli import options
from forerun.cli.bench.shared import print_report, say, set_threads, whole_numbers
from forerun.cli.flags import Flags, with_flags
from forerun.fields import option


@dataclass(frozen=True, slots=True)
class ForwardOptions:
    """Which forwards are timed."""

    model: str | None = option(None, "A folder or hub id.", default_text="a random Llama of 197 M parameters")
    rows: str = option("1,5,8", "Rows of a forward, with commas between them.", metavar="INT,...")
    dtypes: str = option(
        "float32,bfloat16", "Number formats (int8 and int4 too), with commas between them.", metavar="DTYPE,..."
    )
    sequences: str | None = option(
        None, "In place of --rows: sequences of one row each in a forward, with commas between them.", metavar="INT,..."
    )
    num_logits: int | None = option(None, "Rows whose logits are wanted.", default_text="all", low=1)
    prefix: int = option(256, "Cached positions before the new rows.", low=1)
    rounds: int = option(20, "Interleaved rounds.", low=1)


@with_flags
def forward(
    *,
    timed: Annotated[ForwardOptions, Flags()],
    threads: options.Threads = None,
    json: options.Json = False,
    markdown: options.Markdown = False,
) -> None:
    """One target forward of K rows, all logits: Transformers' own module against forerun's paths."""
    by_sequence = timed.sequences is not None
    counts = whole_numbers(timed.sequences or timed.rows, "--sequences" if by_sequence else "--rows")
    dtypes = options.comma_list(timed.dtypes, "--dtypes")
    set_threads(threads)
    from forerun.bench import forward as bench
    from forerun.bench.random_llama import random_llama
    from forerun.bench.reference import quieten

    quieten()
    with ExitStack() as stack:
        folder = timed.model or stack.enter_context(random_llama())
        load = bench.Load(counts, timed.prefix, by_sequence, timed.num_logits)
        results = bench.measure(folder, dtypes, load, timed.rounds, say)
    facts = {"load": load, "rounds": timed.rounds, "results": results}
    what = "forward of sequences of one row each" if by_sequence else "forward"
    title = f"One {what} after {timed.prefix} cached positions, {timed.rounds} interleaved rounds"
    table = bench.table(title, counts, results)
    print_report(Report(facts, [table]), json, markdown)
