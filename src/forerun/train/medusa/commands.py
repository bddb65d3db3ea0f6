"""`forerun train medusa`: from data and a target to a folder of heads with its card."""

from __future__ import annotations

from pathlib import Path

from forerun.train.eagle.commands import train_head
from forerun.train.medusa.kind import MedusaKind
from forerun.train.medusa.options import MedusaTraining


def train_medusa(
    out: Path, work: Path, name: str, data: Path, options: MedusaTraining, command: str, *, resume: bool, force: bool
) -> None:
    """As `train_head`, Medusa heads."""
    train_head(out, work, name, data, MedusaKind(options), command, resume=resume, force=force)
