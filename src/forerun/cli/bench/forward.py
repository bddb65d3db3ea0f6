"""`forerun bench forward`: time one target forward of K rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from forerun.cli import options
from forerun.cli.bench.shared import JsonFile, begin, print_report, say, whole_numbers
from forerun.cli.flags import Flags, with_flags
from forerun.lab.bench.tables import Report
from forerun.utils.fields import option

DEFAULT_MODEL = "random:llama-200m"
PREFIX = 256
"""Cached positions before the new rows."""


@dataclass(frozen=True, slots=True)
class ForwardOptions:
    """Which forwards are timed."""

    rows: str = option(
        "1,5,8",
        "Rows of a forward, with commas between them; over 64, logits are the last row's, as of a prompt.",
        metavar="INT,...",
    )
    dtypes: str = option(
        "stored",
        "Number formats (int8 and int4 too), with commas between them; stored: quantized weights as the files have "
        "them, others in bfloat16.",
        metavar="DTYPE,...",
    )
    rounds: int = option(20, "Interleaved rounds.", low=1)
    others: bool = option(False, "Time Transformers' module, and reference and general decoders, too.")


@with_flags
def forward(
    *,
    model: Annotated[
        str | None,
        options.model_argument("As elsewhere, or random:SHAPE, such as llama-1b or qwen3-4b.", DEFAULT_MODEL),
    ] = None,
    timed: Annotated[ForwardOptions, Flags()],
    threads: options.Threads = None,
    json: JsonFile = None,
) -> None:
    """Time one target forward of K rows: t(K) / t(1), and the bytes of weights read per second."""
    model = model or DEFAULT_MODEL
    counts = whole_numbers(timed.rows, "--rows")
    dtypes = options.comma_list(timed.dtypes, "--dtypes")
    watch = begin(threads, json)
    from forerun.lab.bench import forward as bench
    from forerun.lab.bench.forward import measure_roof
    from forerun.lab.bench.measure import is_cost_padded
    from forerun.lab.bench.methods import quieten
    from forerun.lab.bench.random_model import RANDOM
    from forerun.lab.bench.recorded import forward_figures
    from forerun.lab.results.files import without_folders
    from forerun.lab.results.schema import TargetFacts

    quieten()
    results = bench.time_forwards(model, dtypes, counts, PREFIX, timed.rounds, say, others=timed.others)
    say("measuring bandwidth and arithmetic for the roofline")
    served = list(dict.fromkeys(row.dtype for row in results))
    roof = measure_roof(served)
    target = TargetFacts(
        without_folders(model),
        ", ".join(served),
        cost_padded=is_cost_padded(model),
        random_weights=model.startswith(RANDOM),
        num_parameters=results[0].parameters,
    )
    settings = {"rows": counts, "prefix": PREFIX, "rounds": timed.rounds}
    figures = forward_figures(results, PREFIX, timed.rounds, roof)
    title = f"One forward after {PREFIX} cached positions, {timed.rounds} interleaved rounds"
    if max(counts) > bench.MOST_LOGITS:
        title += f"; over {bench.MOST_LOGITS} rows with one row of logits, as a prompt"
    table = bench.forward_table(title, results)
    report = Report("forward", [table], target, settings=settings, figures=figures, details={"roof": roof})
    print_report(report, watch, json)
