"""`forerun make`: models made from other models, prompts cut from files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.errors import ConfigError
from forerun.files.write import refuse_to_overwrite

Force = Annotated[bool, typer.Option("--force", help="Replace what OUT holds.")]

app = typer.Typer(help="Make models from models, and prompts from files.", no_args_is_help=True)


@app.callback()
def make() -> None:
    """Make models from models, and prompts from files."""


@app.command()
def padded(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    parameters: Annotated[str, typer.Option(help="Size to reach, such as 200M.", metavar="SIZE")],
    layers: Annotated[
        int | None, typer.Option(help="Layers.", metavar="INT", show_default="1.5 times the source's")
    ] = None,
    source: Annotated[
        Path | None, typer.Option(help="A Llama folder.", metavar="FOLDER", show_default="the bundled target")
    ] = None,
    force: Force = False,
) -> None:
    """Write a model that gives the same text at the cost of a larger one, to measure speed at that cost."""
    from forerun.config import ASSETS
    from forerun.train.padded import make_padded, parse_parameters

    sizes = make_padded(source or ASSETS / "target", out, parse_parameters(parameters), layers, force=force)
    typer.echo(
        f"{out}: cost-padded to {sizes.parameters:,} parameters, {sizes.num_layers} layers, "
        f"intermediate size {sizes.intermediate_size}; same text as the original"
    )


@app.command()
def workloads(out: Annotated[Path, typer.Argument(help="Folder to write.")], force: Force = False) -> None:
    """Cut the bundled workloads from the held-out files again: prose, copying, high temperature."""
    from forerun.train import workload_prompts as cut
    from forerun.train.heldout import read_held_out
    from forerun.workloads import load, save

    files = read_held_out()
    for name, prompts in (
        ("prose", cut.prose_prompts(files)),
        ("copying", cut.copying_prompts(files)),
        ("high-temperature", cut.high_temperature_prompts(load("code"))),
    ):
        if not force:
            refuse_to_overwrite(out / f"{name}.jsonl", ConfigError)
        save(prompts, out / f"{name}.jsonl")
        typer.echo(f"{out / name}.jsonl: {len(prompts)} prompts")
