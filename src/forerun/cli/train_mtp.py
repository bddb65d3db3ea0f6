"""`forerun train mtp`: a multi-token-prediction layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from forerun.cli.default_model import chosen_model
from forerun.cli.flags import Flags, with_flags
from forerun.cli.train_eagle import Data, Force, Out, Resume, Target, Work, this_command
from forerun.train.eagle.options import MTP_SHAPE, MTP_TRAINING, EagleShape, EagleTraining

SHAPE = ("draft_vocab", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "sliding_window")


@with_flags
def mtp(
    *,
    out: Out,
    data: Data,
    target: Target = None,
    options: Annotated[EagleTraining, Flags(base=MTP_TRAINING, leave_out=("feature_weight",))],
    shape: Annotated[EagleShape, Flags(*SHAPE, "own_output_rows", base=MTP_SHAPE, panel="Architecture")],
    work: Work = None,
    resume: Resume = False,
    force: Force = False,
) -> None:
    """Train a decoder layer that drafts from its target's last state, as the MTP layers of DeepSeek-V3 do."""
    from forerun.train.eagle.commands import train_eagle

    name, folder = chosen_model(target, "--target"), work or out.with_name(out.name + ".run")
    options = replace(options, shape=shape)
    train_eagle(out, folder, str(name), data, options, this_command(), resume=resume, force=force)
