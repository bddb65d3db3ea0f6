"""Where a run stands, on disk: weights, optimisers and counts in one file with a checksum."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forerun.errors import ConfigError
from forerun.files.write import check_seal, sealed_file
from forerun.train.optim import Optimisers

CHECKPOINT = "checkpoint.pt"
_REMEDY = "Remove it, and --resume begins this stage again."


@dataclass(slots=True)
class LoopState:
    """Where a run stands: steps done, tokens seen, seconds spent training (over all its lives)."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)


def save_checkpoint(folder: Path, model: nn.Module, optimisers: Optimisers, state: LoopState) -> None:
    """Write everything a resume needs into one file that is replaced as a whole or not at all.

    Raises:
        ConfigError: it cannot be written; the former checkpoint is still there.
    """
    content = {
        "model": model.state_dict(),
        "optimisers": optimisers.state_dict(),
        "step": state.step,
        "tokens": state.tokens,
        "seconds": state.seconds,
        "losses": state.losses[-256:],
    }
    packed = io.BytesIO()
    torch.save(content, packed)
    with sealed_file(folder / CHECKPOINT, ConfigError) as file:
        file.write(packed.getbuffer())


def load_checkpoint(folder: Path, model: nn.Module, optimisers: Optimisers) -> LoopState:
    """Restore model and optimisers; a fresh state if `folder` holds no checkpoint.

    Only tensors and plain values are read (`weights_only`): the file can run no code.

    Raises:
        ConfigError: the file is damaged, or of another model.
    """
    path = folder / CHECKPOINT
    if not path.exists():
        return LoopState()
    check_seal(path, ConfigError, _REMEDY)
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(content["model"])
        optimisers.load_state_dict(content["optimisers"])
        return LoopState(content["step"], content["tokens"], content["seconds"], list(content["losses"]))
    except Exception as failure:  # whatever PyTorch makes of it
        raise ConfigError(f"{path} is no checkpoint of this model: {failure}. {_REMEDY}") from failure
