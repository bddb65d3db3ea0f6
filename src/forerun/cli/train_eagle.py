"""`forerun train eagle`: a head that reads its target's hidden states."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.default_model import chosen_model
from forerun.cli.flags import Flags, with_flags
from forerun.train.eagle.options import EagleShape, EagleTraining

Out = Annotated[Path, typer.Argument(help="Head's folder to write.")]
Target = Annotated[
    str | None,
    typer.Option(
        help="The target model: 'smollm2' once it is fetched, 'bundled', a folder, a GGUF file, or a hub id.",
        metavar="MODEL",
        show_default="smollm2 if it is fetched, else bundled",
    ),
]
Data = Annotated[
    Path,
    typer.Option(
        help="What to learn from: a file of the target's answers (`forerun train answers`), text, a folder of either, "
        "or a folder of packed rows.",
        metavar="PATH",
    ),
]
Work = Annotated[
    Path | None,
    typer.Option(help="Folder for checkpoints and packed rows.", metavar="FOLDER", show_default="OUT.run"),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")]
Force = Annotated[bool, typer.Option("--force", help="Begin anew, and replace the head in OUT.")]


@with_flags
def eagle(
    *,
    out: Out,
    data: Data,
    target: Target = None,
    options: Annotated[EagleTraining, Flags()],
    shape: Annotated[EagleShape, Flags(panel="Architecture")],
    work: Work = None,
    resume: Resume = False,
    force: Force = False,
) -> None:
    """Train a head that drafts from its target's hidden states (EAGLE-3, or EAGLE-1 by --version 1)."""
    from forerun.train.eagle.commands import train_eagle

    name = chosen_model(target, "--target")
    folder = work or out.with_name(out.name + ".run")
    options = replace(options, shape=shape)
    train_eagle(out, folder, str(name), data, options, this_command(), resume=resume, force=force)


def this_command() -> str:
    """The command line, with the last part of each path."""
    return shlex.join(["forerun", *(Path(part).name if "/" in part else part for part in sys.argv[1:])])
