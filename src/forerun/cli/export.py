"""`forerun export`: models in the formats of other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.config import DTYPES

app = typer.Typer(help="Write models in the formats of other programs.", no_args_is_help=True)


@app.callback()
def export() -> None:
    """Write models in the formats of other programs."""


@app.command()
def hf(
    model: Annotated[
        str, typer.Argument(help="'smollm2', 'bundled', a folder, a GGUF file, or a hub id.", metavar="MODEL")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write.", metavar="OUT")],
    dtype: Annotated[
        str, typer.Option(help=f"Number format of the weights: {', '.join(DTYPES)}.", metavar="TEXT")
    ] = "auto",
    adapter: Annotated[
        str | None, typer.Option(help="The folder of a PEFT LoRA adapter of the model, to merge.", metavar="FOLDER")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the model that OUT holds; other files there stay.")
    ] = False,
) -> None:
    """Write a Transformers folder: safetensors, configuration, tokenizer with chat template, end tokens."""
    from forerun.export import export_hf

    typer.echo(f"forerun: loading {model}", err=True)
    exported = export_hf(model, out, dtype, adapter=adapter, force=force)
    typer.echo(
        f"{out}: {exported.num_parameters:,} parameters in {exported.dtype}, {exported.nbytes:,} bytes in "
        f"{len(exported.files)} files"
    )
