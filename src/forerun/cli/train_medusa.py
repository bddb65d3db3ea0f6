"""`forerun train medusa`: heads on a target's last state."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from forerun.cli.default_model import chosen_model
from forerun.cli.flags import Flags, with_flags
from forerun.cli.train_eagle import Data, Force, Out, Resume, Target, Work, this_command
from forerun.train.medusa.options import MedusaShape, MedusaTraining


@with_flags
def medusa(
    *,
    out: Out,
    data: Data,
    target: Target = None,
    options: Annotated[MedusaTraining, Flags()],
    shape: Annotated[MedusaShape, Flags(panel="Architecture")],
    work: Work = None,
    resume: Resume = False,
    force: Force = False,
) -> None:
    """Train heads that each predict one token further on from their target's last state (Medusa; Hydra by
    --sequential)."""
    from forerun.train.medusa.commands import train_medusa

    name, folder = chosen_model(target, "--target"), work or out.with_name(out.name + ".run")
    options = replace(options, shape=shape)
    train_medusa(out, folder, str(name), data, options, this_command(), resume=resume, force=force)
