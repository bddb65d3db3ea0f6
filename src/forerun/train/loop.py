"""The loop every training command runs: steps, progress, checkpoints, resume after a kill.

A batch depends on the number of its step alone and nothing is drawn while training, so a run that
was killed and resumed ends with the same weights as one that was not.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from forerun.engine.interrupts import HeldInterrupts
from forerun.train import attention
from forerun.train.accelerator import LOSSES_READ_EVERY, MICRO_TOKENS, device_of
from forerun.train.checkpoint import LoopState, save_checkpoint
from forerun.train.optim import Optimisers
from forerun.train.workers import Batch, Workers

METRICS = "metrics.jsonl"


@dataclass(slots=True)
class Loop:
    """A training run of `total_steps` steps whose state lives in `folder`."""

    folder: Path
    model: nn.Module
    optimisers: Optimisers
    total_steps: int
    batch: Callable[[int], Batch]
    """Step number -> tensors that agree in their first dimension, rows; the first [rows, window + 1] token ids."""
    loss: Callable[[nn.Module, Batch, float], Tensor]
    """(model, rows of the batch, progress) -> their mean loss; progress in [0, 1)."""
    checkpoint_seconds: float
    workers: Workers

    def run(self, state: LoopState, console: Console, title: str) -> LoopState:
        """Train from `state` to the end, or until interrupted; the last act is a checkpoint.

        Raises:
            ConfigError: a checkpoint cannot be written.
            KeyboardInterrupt: after Ctrl-C, when the step is done and saved.
        """
        last_save = time.monotonic()
        self.model.train()
        with (
            HeldInterrupts() as held,
            self._progress(console) as progress,
            (self.folder / METRICS).open("a") as metrics,
        ):
            task = progress.add_task(title, total=self.total_steps, completed=state.step, loss=0.0, speed=0.0)
            while state.step < self.total_steps and not held.pending:
                speed = self._several_steps(state)
                recent = state.losses[-32:]
                progress.update(task, completed=state.step, loss=sum(recent) / len(recent), speed=speed)
                metrics.write(
                    json.dumps({"step": state.step, "loss": round(state.losses[-1], 4), "tokens_per_s": round(speed)})
                    + "\n"
                )
                metrics.flush()
                if time.monotonic() - last_save > self.checkpoint_seconds:
                    save_checkpoint(self.folder, self.model, self.optimisers, state)
                    last_save = time.monotonic()
            save_checkpoint(self.folder, self.model, self.optimisers, state)
            interrupted = held.pending
        if interrupted:  # the handler of SIGINT may be one that raises nothing
            raise KeyboardInterrupt
        return state

    def _several_steps(self, state: LoopState) -> float:
        """As many steps as losses are read at once; their tokens per second."""
        started, former = time.monotonic(), state.tokens
        values = []
        count = min(LOSSES_READ_EVERY[device_of(self.model).type], self.total_steps - state.step)
        for step in range(state.step, state.step + count):
            batch = self.batch(step)
            for replica in self.workers.replicas:
                attention.use_for(replica, batch[0].shape[1] - 1)
            values.append(self._step(batch, step / self.total_steps))
            state.tokens += batch[0].shape[0] * (batch[0].shape[1] - 1)
        state.losses.extend(float(value) for value in values)
        seconds = time.monotonic() - started
        state.step += count
        state.seconds += seconds
        return (state.tokens - former) / seconds

    def _step(self, batch: Batch, progress: float) -> float | Tensor:
        count = len(batch[0])
        most = max(1, MICRO_TOKENS[device_of(self.model).type] // (batch[0].shape[1] - 1))
        rows = min(most, math.ceil(count / self.workers.count))

        def backward(model: nn.Module, piece: Batch) -> Tensor:
            loss = self.loss(model, piece, progress) * (len(piece[0]) / count)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        pieces = list(zip(*(torch.split(tensor, rows) for tensor in batch), strict=True))
        total = self.workers.run(backward, pieces)
        self.optimisers.step(progress, self.workers.pool)
        return total

    @staticmethod
    def _progress(console: Console) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
