"""`forerun train eagle`, `block`, `medusa` and `mtp`: heads that read their target's hidden states."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.default_model import chosen_model
from forerun.cli.flags import Flags, with_flags
from forerun.cli.options import TargetName
from forerun.train.block.options import BlockShape, BlockTraining
from forerun.train.eagle.options import MTP_SHAPE, MTP_TRAINING, EagleShape, EagleTraining
from forerun.train.medusa.options import MedusaShape, MedusaTraining

if TYPE_CHECKING:
    from forerun.train.heads.kind import HeadKind

Out = Annotated[Path, typer.Argument(help="Head's folder to write.", metavar="OUT")]
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
    typer.Option(help="Folder for checkpoints and packed rows.", metavar="FOLDER", show_default="OUT.run", hidden=True),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")]
Force = Annotated[bool, typer.Option("--force", help="Begin anew, and replace the head in OUT.")]
TYPED = ("epochs", "device")
_SIZES = ("draft_vocab", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "sliding_window")


@with_flags
def eagle(
    *,
    out: Out,
    data: Data,
    target: TargetName = None,
    options: Annotated[EagleTraining, Flags(typed=TYPED)],
    shape: Annotated[EagleShape, Flags(typed=("version",), panel="Architecture")],
    work: Work = None,
    resume: Resume = False,
    force: Force = False,
) -> None:
    """Train a head that drafts from its target's hidden states (EAGLE-3, or EAGLE-1 by --version 1)."""
    from forerun.train.eagle.kind import EagleKind

    _train(EagleKind(replace(options, shape=shape)), out, work, target, data, resume=resume, force=force)


@with_flags
def block(
    *,
    out: Out,
    data: Data,
    target: TargetName = None,
    options: Annotated[BlockTraining, Flags(typed=TYPED)],
    shape: Annotated[BlockShape, Flags(typed=("block_size",), panel="Architecture")],
    work: Work = None,
    resume: Resume = False,
    force: Force = False,
) -> None:
    """Train a head that drafts a whole block in one pass (DFlash), with a bias by the token before (DSpark)."""
    from forerun.train.block.kind import BlockKind

    _train(BlockKind(replace(options, shape=shape)), out, work, target, data, resume=resume, force=force)


@with_flags
def medusa(
    *,
    out: Out,
    data: Data,
    target: TargetName = None,
    options: Annotated[MedusaTraining, Flags(typed=TYPED)],
    shape: Annotated[MedusaShape, Flags(typed=("sequential",), panel="Architecture")],
    work: Work = None,
    resume: Resume = False,
    force: Force = False,
) -> None:
    """Train heads that each predict one token further on from their target's last state (Medusa; Hydra by
    --sequential)."""
    from forerun.train.medusa.kind import MedusaKind

    _train(MedusaKind(replace(options, shape=shape)), out, work, target, data, resume=resume, force=force)


@with_flags
def mtp(
    *,
    out: Out,
    data: Data,
    target: TargetName = None,
    options: Annotated[EagleTraining, Flags(base=MTP_TRAINING, leave_out=("feature_weight",), typed=TYPED)],
    shape: Annotated[EagleShape, Flags(*_SIZES, "own_output_rows", base=MTP_SHAPE, typed=())],
    work: Work = None,
    resume: Resume = False,
    force: Force = False,
) -> None:
    """Train a decoder layer that drafts from its target's last state, as the MTP layers of DeepSeek-V3 do."""
    from forerun.train.eagle.kind import EagleKind

    _train(EagleKind(replace(options, shape=shape)), out, work, target, data, resume=resume, force=force)


def _train(
    kind: HeadKind[Any], out: Path, work: Path | None, target: str | None, data: Path, *, resume: bool, force: bool
) -> None:
    from forerun.train.heads.commands import train_head

    name, folder = chosen_model(target, "--target"), work or out.with_name(out.name + ".run")
    train_head(out, folder, str(name), data, kind, this_command(), resume=resume, force=force)


def this_command() -> str:
    """The command line, with the last part of each path."""
    parts = []
    for part in sys.argv[1:]:
        flag, equals, value = part.partition("=") if part.startswith("-") else ("", "", part)
        parts.append(flag + equals + (Path(value).name if "/" in value else value))
    return shlex.join(["forerun", *parts])
