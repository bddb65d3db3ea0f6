"""`forerun train block`: from data and a target to a head's folder with its card."""

from __future__ import annotations

from pathlib import Path

from forerun.train.block.kind import BlockKind
from forerun.train.block.options import BlockTraining
from forerun.train.eagle.commands import train_head


def train_block(
    out: Path, work: Path, name: str, data: Path, options: BlockTraining, command: str, *, resume: bool, force: bool
) -> None:
    """As `train_head`, a block head."""
    train_head(out, work, name, data, BlockKind(options), command, resume=resume, force=force)
