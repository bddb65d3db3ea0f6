"""What a training run needs of memory and disk, estimated and printed before its first step."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from forerun.errors import ConfigError
from forerun.train.accelerator import device_of
from forerun.train.checkpoint import BEST, CHECKPOINT
from forerun.train.optim import Optimisers
from forerun.utils.machine import available_memory, resident_memory

_FLOAT32 = 4
_KEPT = 2
"""Values that a forward keeps of each product's output for the backward pass, its gradient included."""
_WIDEST = 8
"""Outputs of a product over its inputs, at most: what has more is a table of embeddings, which has a row for each."""


@dataclass(frozen=True, slots=True)
class RunNeeds:
    """What a run needs, in bytes.

    Attributes:
        present: in memory already: the target, the weights that are trained, libraries.
        gradients, optimiser, activations: that training adds.
        checkpoints: that the run keeps on disk, with the target's labels.
        written: that the disk needs room for beside what is there: a checkpoint replaces the former one when it is
            complete, and the result comes beside them.
    """

    present: int
    gradients: int
    optimiser: int
    activations: int
    checkpoints: int
    written: int

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimisers: Optimisers,
        folder: Path,
        *,
        replicas: int,
        tokens: int,
        logits: int,
        keeps_best: bool,
        samples: int = 0,
    ) -> RunNeeds:
        """Estimate the needs of a run.

        Args:
            replicas: of the model, each with gradients of its own.
            tokens: computed at the same time.
            logits: of a token that are in memory at once.
            keeps_best: the weights of the best evaluation are kept, too.
            samples: bytes of the target's labels that are to be written.
        """
        weights = _FLOAT32 * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        outputs = sum(min(len(matrix), _WIDEST * matrix.shape[1]) for matrix in matrices)
        checkpoint = weights + optimisers.state_nbytes
        best = weights if keeps_best else 0
        there = sum(path.stat().st_size for path in (folder / CHECKPOINT, folder / BEST) if path.exists())
        return cls(
            _present(device_of(model)),
            weights * replicas,
            optimisers.state_nbytes,
            _KEPT * _FLOAT32 * tokens * (outputs + logits),
            checkpoint + best + samples,
            samples + max(0, checkpoint + best + max(checkpoint, best) + weights - there),
        )

    def say(self, folder: Path, console: Console, where: torch.device) -> None:
        """Print them in one line.

        Raises:
            ConfigError: the disk has too little room.
        """
        added = self.gradients + self.optimiser + self.activations
        free_memory = _free(where)
        folder.mkdir(parents=True, exist_ok=True)
        free_disk = shutil.disk_usage(folder).free
        parts = f"gradients {_gb(self.gradients)}, optimiser {_gb(self.optimiser)}, activations {_gb(self.activations)}"
        line = f"memory about {_gb(self.present + added)} GB: {_gb(self.present)} in use now, {parts}"
        if free_memory is not None:
            line += f"; {_gb(free_memory)} free" + (", which is too little" if added > free_memory else "")
        line += f" · disk {_gb(self.checkpoints)} GB in {folder}; {_gb(free_disk)} free"
        console.print(line, highlight=False, soft_wrap=True, markup=False)
        if self.written > free_disk:
            raise ConfigError(
                f"{folder} has too little room: checkpoints, labels and the result need {_gb(self.written)} GB while "
                f"they are written, {_gb(free_disk)} GB are free. Make room there, or give an OUT on another disk."
            )


def _present(where: torch.device) -> int:
    """Return the bytes of memory that this process uses on a device."""
    return torch.cuda.memory_allocated(where) if where.type == "cuda" else resident_memory()


def _free(where: torch.device) -> int | None:
    """Return the bytes of memory that are free on a device; None if unknown."""
    return torch.cuda.mem_get_info(where)[0] if where.type == "cuda" else available_memory()


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}"
