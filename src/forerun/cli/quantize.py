"""`forerun quantize`: save a model with its weights at 8 or 4 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.cli import options
from forerun.cli.flags import with_flags
from forerun.cli.output import show_written
from forerun.config import QUANTISATIONS
from forerun.errors import ConfigError

PROSE = "prose"
"""The bundled workload on which the loss is measured."""


@with_flags
def quantize(
    *,
    model: Annotated[str, options.model_argument(options.A_MODEL, None)],
    out: Annotated[Path, typer.Argument(help="Folder to write.", metavar="OUT")],
    quantize: Annotated[
        str,
        typer.Option(help=f"What the weights are kept in: {' or '.join(QUANTISATIONS)}.", metavar="FORMAT"),
    ] = "int8",
    adapter: Annotated[
        str | None,
        typer.Option(help="The folder of a PEFT LoRA adapter of the model, to merge first.", metavar="FOLDER"),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the model that OUT holds; other files there stay.")
    ] = False,
    measure: Annotated[
        bool,
        typer.Option(help=f"Measure what is lost on the bundled {PROSE}, and write it into the model card (minutes)."),
    ] = True,
) -> None:
    """Write a folder that forerun serves at 8 or 4 bits without quantizing anew."""
    if quantize not in QUANTISATIONS:
        raise ConfigError(f"--quantize is {quantize!r}, but must be one of {', '.join(QUANTISATIONS)}.")
    from forerun.export.quantized import export_quantized

    options.set_threads(None)
    typer.echo(f"forerun: quantizing {model}", err=True)
    exported = export_quantized(
        model,
        out,
        quantize,
        adapter=adapter,
        force=force,
        cost=(lambda: measured_loss(model, quantize, adapter)) if measure else None,
    )
    show_written(out, exported)


def measured_loss(model: str, bits: str, adapter: str | None) -> str:
    """Measure the loss on the bundled prose, as Markdown; a sentence if it cannot be measured."""
    from forerun.cli.bench.quality import MAX_TOKENS, measure_quality
    from forerun.lab.bench.quality import COLUMNS
    from forerun.lab.bench.tables import Table, markdown_table
    from forerun.models import find_tokenizer
    from forerun.models.loading.source import find_source
    from forerun.utils.workloads import load_workload

    if find_tokenizer(model, adapter) is None:
        return "Not measured: the model has no tokenizer."
    if find_source(model).quantization() is not None:
        return "Not measured: the model was quantized already, so its original weights are unknown."
    rows = measure_quality(model, ["bfloat16", bits], {PROSE: load_workload(PROSE)}, MAX_TOKENS, adapter)
    table = Table.of("", COLUMNS, rows)
    about = "On forerun's bundled prose, beside the same model in float32; KL is the mean divergence from it per token."
    return f"{about}\n\n{markdown_table(table.header, table.rows)}"
