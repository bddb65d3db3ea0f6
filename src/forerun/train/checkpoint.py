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
BEST = "best.pt"
_REMEDY = "Remove it, and --resume begins this stage again."


@dataclass(slots=True)
class LoopState:
    """Where a run stands: steps done, tokens seen, seconds spent training (over all its lives)."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    scores: list[tuple[int, float]] = field(default_factory=list)
    """Step and score of each evaluation."""

    @property
    def best_step(self) -> int:
        """Of the best evaluation, the last of several; 0 without one."""
        return max(((score, step) for step, score in self.scores), default=(0.0, 0))[1]


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
        "scores": [list(pair) for pair in state.scores],
    }
    _write(folder / CHECKPOINT, content)


def save_best(folder: Path, model: nn.Module, step: int) -> None:
    """Keep the weights of the best evaluation yet. Raises ConfigError as `save_checkpoint`."""
    _write(folder / BEST, {"model": model.state_dict(), "step": step})


def load_best(folder: Path, model: nn.Module, step: int) -> None:
    """Restore what `save_best` kept.

    Raises:
        ConfigError: it is missing, damaged, or of another step or model.
    """
    path = folder / BEST
    check_seal(path, ConfigError, _REMEDY)
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if content["step"] != step:
            raise ValueError(f"it is of step {content['step']}, not {step}")
        model.load_state_dict(content["model"])
    except Exception as failure:
        raise ConfigError(f"{path} does not hold the best weights: {failure}. {_REMEDY}") from failure


def _write(path: Path, content: dict[str, Any]) -> None:
    packed = io.BytesIO()
    torch.save(content, packed)
    with sealed_file(path, ConfigError) as file:
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
        scores = [(int(step), float(score)) for step, score in content.get("scores", [])]
        return LoopState(content["step"], content["tokens"], content["seconds"], list(content["losses"]), scores)
    except Exception as failure:  # whatever PyTorch makes of it
        raise ConfigError(f"{path} is no checkpoint of this model: {failure}. {_REMEDY}") from failure
