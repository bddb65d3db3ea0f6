"""`forerun bench forward`: time one target forward of K rows."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated

from forerun.cli import options
from forerun.cli.bench.shared import JsonFile, begin, print_report, say, whole_numbers
from forerun.cli.flags import Flags, with_flags
from forerun.lab.bench.tables import Report, Table
from forerun.utils.fields import option

PREFIX = 256
"""Cached positions before the new rows."""


@dataclass(frozen=True, slots=True)
class ForwardOptions:
    """Which forwards are timed."""

    model: str | None = option(None, "A folder or hub id.", default_text="a random Llama of 197 M parameters")
    rows: str = option("1,5,8", "Rows of a forward, with commas between them.", metavar="INT,...")
    dtypes: str = option(
        "float32,bfloat16", "Number formats (int8 and int4 too), with commas between them.", metavar="DTYPE,..."
    )
    rounds: int = option(20, "Interleaved rounds.", low=1)


@with_flags
def forward(
    *,
    timed: Annotated[ForwardOptions, Flags()],
    threads: options.Threads = None,
    json: JsonFile = None,
) -> None:
    """Time one target forward of K rows, all logits: Transformers' own module against forerun's."""
    counts, dtypes = whole_numbers(timed.rows, "--rows"), options.comma_list(timed.dtypes, "--dtypes")
    watch = begin(threads, json)
    from forerun.lab.bench import forward as bench
    from forerun.lab.bench.forward import measure_roof, random_llama
    from forerun.lab.bench.measure import is_cost_padded
    from forerun.lab.bench.methods import quieten
    from forerun.lab.bench.recorded import forward_figures
    from forerun.lab.results.files import without_folders
    from forerun.lab.results.schema import TargetFacts

    quieten()
    with ExitStack() as stack:
        folder = timed.model or stack.enter_context(random_llama())
        results = bench.measure(folder, dtypes, counts, PREFIX, timed.rounds, say)
    say("measuring bandwidth and arithmetic for the roofline")
    roof = measure_roof(dtypes)
    name = "a random Llama" if timed.model is None else without_folders(timed.model)
    target = TargetFacts(
        name,
        ", ".join(dtypes),
        cost_padded=is_cost_padded(folder),
        random_weights=timed.model is None,
        num_parameters=results[0].parameters,
    )
    settings = {"rows": counts, "prefix": PREFIX, "rounds": timed.rounds}
    figures = forward_figures(results, PREFIX, timed.rounds, roof)
    title = f"One forward after {PREFIX} cached positions, {timed.rounds} interleaved rounds"
    table = Table.of(title, bench.COLUMNS, results)
    report = Report("forward", [table], target, settings=settings, figures=figures, details={"roof": roof})
    print_report(report, watch, json)
