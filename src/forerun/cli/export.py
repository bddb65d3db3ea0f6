"""`forerun export`: models in the formats of other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.output import print_json
from forerun.config import DTYPES, HEAD_FORMS

app = typer.Typer(help="Write models and draft heads in the formats of other programs.", no_args_is_help=True)


@app.callback()
def export() -> None:
    """Write models and draft heads in the formats of other programs."""


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


@app.command()
def head(
    head: Annotated[Path, typer.Argument(help="Folder of a head that forerun trained.", metavar="HEAD")],
    out: Annotated[Path, typer.Argument(help="Folder to write.", metavar="OUT")],
) -> None:
    """Write a head with its matrices at 8 bits: a quarter of the bytes."""
    from forerun.export import export_head

    exported = export_head(head, out)
    typer.echo(
        f"{out}: {exported.num_parameters:,} parameters in {exported.dtype}, {exported.nbytes:,} bytes in "
        f"{len(exported.files)} files"
    )


@app.command()
def vllm(
    head: Annotated[Path, typer.Argument(help="Folder of a trained head.", metavar="HEAD")],
    out: Annotated[Path, typer.Argument(help="Folder to write.", metavar="OUT")],
    target: Annotated[str, typer.Option(help="The model that the head was trained for.", metavar="MODEL")],
    form: Annotated[str, typer.Option(help=f"What is written: {' or '.join(HEAD_FORMS)}.", metavar="FORM")] = "auto",
    dtype: Annotated[
        str, typer.Option(help=f"Number format of the weights: {', '.join(DTYPES)}.", metavar="TEXT")
    ] = "auto",
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-draft-tokens",
            "-k",
            min=1,
            help="Tokens that vLLM is to draft a step.",
            metavar="INT",
            show_default="3; as many as there are Medusa heads",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace what OUT holds of a model; other files there stay.")
    ] = False,
) -> None:
    """Write a draft head as a folder that vLLM loads, and the speculative configuration to start it with.

    The configuration is printed, and lies in OUT as speculative_config.json.
    """
    from forerun.export import export_vllm

    typer.echo(f"forerun: loading {target}", err=True)
    exported = export_vllm(head, out, target, form=form, dtype=dtype, num_draft_tokens=num_draft_tokens, force=force)
    files = exported.files
    typer.echo(
        f"{out}: {files.num_parameters:,} parameters in {files.dtype}, {files.nbytes:,} bytes in "
        f"{len(files.files)} files",
        err=True,
    )
    print_json(exported.speculative)
