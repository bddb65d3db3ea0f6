"""`forerun train block`: a head that drafts a whole block in one pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from forerun.cli.default_model import chosen_model
from forerun.cli.flags import Flags, with_flags
from forerun.cli.train_eagle import Data, Force, Out, Resume, Target, Work, this_command
from forerun.train.block.options import BlockShape, BlockTraining


@with_flags
def block(
    *,
    out: Out,
    data: Data,
    target: Target = None,
    options: Annotated[BlockTraining, Flags()],
    shape: Annotated[BlockShape, Flags(panel="Architecture")],
    work: Work = None,
    resume: Resume = False,
    force: Force = False,
) -> None:
    """Train a head that drafts a whole block in one pass (DFlash), with a bias by the token before (DSpark)."""
    from forerun.train.block.commands import train_block

    name, folder = chosen_model(target, "--target"), work or out.with_name(out.name + ".run")
    options = replace(options, shape=shape)
    train_block(out, folder, str(name), data, options, this_command(), resume=resume, force=force)
