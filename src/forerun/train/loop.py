"""The loop of every training command: steps, progress, checkpoints, resume after a kill.

A batch and its random draws depend on the number of its step alone, so a run that was killed and resumed ends with
the same weights as one that was not.
"""

from __future__ import annotations

import copy
import json
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from torch import Tensor, nn

from forerun.engine.engine import HeldInterrupts
from forerun.errors import ConfigError
from forerun.train.accelerator import LOSSES_READ_EVERY, MICRO_TOKENS, device_of
from forerun.train.checkpoint import METRICS, LoopState, load_best, save_best, save_checkpoint
from forerun.train.optim import Optimisers

Batch = tuple[Tensor, ...]
"""Tensors that agree in their first dimension; the first holds token ids, [rows, tokens + 1]."""

PROGRESS_SECONDS = 10.0
"""Between two lines of progress."""
_TIMED_STEPS = 2
"""Steps that are timed before a run to estimate its duration; the first of them is slower than the others."""


class StageProgress:
    """The progress of a stage of a run while the block lasts: a bar on a terminal, elsewhere a line every ten seconds.

    Args:
        total, done: parts of the stage, and how many there are already.
        enough: parts after which the remaining time is estimated: the first of many at once take the time of all.
        end: when it ends at the latest, on the clock of time.monotonic.
    """

    def __init__(
        self, console: Console, title: str, total: int, done: int = 0, enough: int = 1, *, end: float = math.inf
    ) -> None:
        self._console = console
        self._title = title
        self._total = total
        self._enough = enough
        self._end = end
        self._first = done
        self._done = done
        self._start = time.monotonic()
        self._detail = ""
        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[now]}")
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task(title, total=total, completed=done, now="")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._print, daemon=True)

    def __enter__(self) -> StageProgress:
        self._bar.start()
        if not self._console.is_terminal:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._bar.stop()

    def show(self, done: int, detail: str = "", tokens: int = 0) -> None:
        """Show how many parts are done, what else there is to say, and the speed at which this took so many tokens."""
        speed = f"{tokens / (time.monotonic() - self._start):,.0f} tokens/s" if tokens else ""
        self._done = done
        self._detail = detail or speed
        self._bar.update(self._task, completed=done, now=self._now())

    def _now(self) -> str:
        spent = time.monotonic() - self._start
        new = self._done - self._first
        left = (self._total - self._done) * spent / new if new >= self._enough else math.inf
        left = max(0.0, min(left, self._end - time.monotonic()))
        return " · ".join(filter(None, [self._detail, f"about {_in_words(left)} left" if 0 < left < math.inf else ""]))

    def _print(self) -> None:
        while not self._over.wait(PROGRESS_SECONDS):
            parts = f"{self._title}: {self._done:,} of {self._total:,}", self._now()
            self._console.print(" · ".join(filter(None, parts)), highlight=False, soft_wrap=True)


class Workers:
    """Replicas of `model` that share its weights and have gradients of their own.

    `threads`: how many; 0 means PyTorch's number of threads on a CPU, and one on a GPU.
    """

    def __init__(self, model: nn.Module, threads: int = 0) -> None:
        on_cpu = next(model.parameters()).device.type == "cpu"
        self.count = (threads or torch.get_num_threads()) if on_cpu else 1
        self.replicas = [model]
        for _ in range(self.count - 1):
            replica = copy.deepcopy(model)
            for own, shared in zip(replica.parameters(), model.parameters(), strict=True):
                own.data = shared.data
            self.replicas.append(replica)
        self.pool = ThreadPoolExecutor(self.count) if self.count > 1 else None

    def run(self, backward: Callable[[nn.Module, Batch], Tensor], pieces: list[Batch]) -> float | Tensor:
        """Sum of `backward(replica, piece)` over all pieces; gradients end up in the first replica.

        Piece i goes to replica i mod count, so that the order of additions never changes.
        """
        if self.pool is None:
            return sum(backward(self.replicas[0], piece) for piece in pieces)

        def work(index: int) -> float | Tensor:
            torch.set_num_threads(1)
            return sum(backward(self.replicas[index], piece) for piece in pieces[index :: self.count])

        total = sum(self.pool.map(work, range(self.count)))
        for replica in self.replicas[1:]:
            for main, other in zip(self.replicas[0].parameters(), replica.parameters(), strict=True):
                if other.grad is not None:
                    main.grad = other.grad if main.grad is None else main.grad.add_(other.grad)
                    other.grad = None
        return total


@dataclass(frozen=True, slots=True)
class Evaluations:
    """The evaluations of a run in progress.

    Attributes:
        score: of the model; higher is better. It draws nothing.
        every: steps between two of them.
        patience: evaluations in a row without a better one after which the run ends; 0 to go on.
    """

    score: Callable[[nn.Module], float]
    every: int
    patience: int = 0

    def are_over(self, scores: list[tuple[int, float]]) -> bool:
        """Return whether they end the run."""
        values = [score for _, score in scores]
        return self.patience > 0 and len(values) > self.patience and max(values) not in values[-self.patience :]


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
    evaluations: Evaluations | None = None
    end: float = math.inf
    """When the run ends, whatever step it has come to, on the clock of time.monotonic; its schedule ends then, too."""
    began: float = field(default_factory=time.monotonic)
    """When it began, on the same clock, as if it had never been interrupted."""

    def announce(self, state: LoopState, console: Console) -> None:
        """Print how long the remaining run will take, by timing steps that change nothing."""
        left = self.total_steps - state.step
        if left <= _TIMED_STEPS:
            return
        for step in range(state.step, state.step + _TIMED_STEPS):
            started = time.monotonic()
            self._gradients(self.batch(step), step / self.total_steps)
            self.model.zero_grad(set_to_none=True)
            seconds = time.monotonic() - started
        rest = min(left * seconds, max(0.0, self.end - time.monotonic()))
        console.print(f"{left:,} steps of {seconds:.2f} s: about {_in_words(rest)}", highlight=False)

    def run(self, state: LoopState, console: Console, title: str) -> LoopState:
        """Train from `state` to the end, or until interrupted; the last act is a checkpoint.

        With evaluations, the weights of the best of them are the model's in the end.

        Raises:
            ConfigError: a checkpoint cannot be written, or loss or gradient are no numbers; the last checkpoint stays.
            KeyboardInterrupt: after Ctrl-C, when the step is done and saved.
        """
        last_save = time.monotonic()
        self.began = last_save - state.seconds
        self.model.train()
        over = self._is_over(state)
        with (
            HeldInterrupts() as held,
            StageProgress(console, title, self.total_steps, state.step, end=self.end) as progress,
            (self.folder / METRICS).open("a") as metrics,
        ):
            while not over and not self._ended_early(state) and not held.pending:
                speed = self._several_steps(state)
                over = self._is_over(state)
                self._evaluate(state, metrics, last=over)
                recent = state.losses[-32:]
                progress.show(state.step, f"loss {sum(recent) / len(recent):.3f} · {speed:,.0f} tokens/s")
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
        if state.step < self.total_steps and over:
            steps = f"step {state.step:,} of {self.total_steps:,}"
            console.print(f"{title}: ended by --minutes after {steps}; --resume goes on", highlight=False)
        if state.scores and state.best_step < state.step:
            load_best(self.folder, self.model, state.best_step)
        return state

    def _is_over(self, state: LoopState) -> bool:
        """Return whether steps or time are over; one step is always done."""
        return state.step >= self.total_steps or (state.step > 0 and time.monotonic() >= self.end)

    def _share(self, step: int) -> float:
        """Return the share of the run that lies before a step, in [0, 1): of its steps or its time, if that is more."""
        spent = (time.monotonic() - self.began) / max(1e-9, self.end - self.began)
        return max(step / self.total_steps, min(spent, 1 - 1e-9))

    def _ended_early(self, state: LoopState) -> bool:
        return self.evaluations is not None and self.evaluations.are_over(state.scores)

    def _evaluate(self, state: LoopState, metrics: TextIO, *, last: bool) -> None:
        """Evaluate every so many steps and after the last one, and keep the weights if they are the best."""
        due = self.evaluations
        former = state.scores[-1][0] if state.scores else 0
        if due is None or (state.step // due.every == former // due.every and not last):
            return
        self.model.eval()
        score = due.score(self.model)
        self.model.train()
        state.scores.append((state.step, score))
        metrics.write(json.dumps({"step": state.step, "score": round(score, 4)}) + "\n")
        if state.best_step == state.step:
            save_best(self.folder, self.model, state.step)

    def _several_steps(self, state: LoopState) -> float:
        """Do as many steps as losses are read at once; return their tokens per second."""
        started = time.monotonic()
        former = state.tokens
        values = []
        count = min(LOSSES_READ_EVERY[device_of(self.model).type], self.total_steps - state.step)
        for step in range(state.step, state.step + count):
            batch = self.batch(step)
            values.append(self._step(batch, self._share(step)))
            state.tokens += batch[0].shape[0] * (batch[0].shape[1] - 1)
        losses = [float(loss) for loss, _ in values]
        if not all(math.isfinite(value) for value in (*losses, *(float(norm) for _, norm in values))):
            raise ConfigError(
                f"The loss or its gradient is no number any more near step {state.step + count:,}. The last checkpoint "
                f"in {self.folder} is from before. Begin anew by --force with a lower learning rate."
            )
        state.losses.extend(losses)
        seconds = time.monotonic() - started
        state.step += count
        state.seconds += seconds
        return (state.tokens - former) / seconds

    def _step(self, batch: Batch, progress: float) -> tuple[float | Tensor, Tensor]:
        """Do one step; return the loss, and the norm of its gradient."""
        loss = self._gradients(batch, progress)
        return loss, self.optimisers.step(progress, self.workers.pool)

    def _gradients(self, batch: Batch, progress: float) -> float | Tensor:
        """Compute the loss, and add its gradients to the model's."""
        count = len(batch[0])
        most = max(1, MICRO_TOKENS[device_of(self.model).type] // (batch[0].shape[1] - 1))
        rows = min(most, math.ceil(count / self.workers.count))

        def backward(model: nn.Module, piece: Batch) -> Tensor:
            loss = self.loss(model, piece, progress) * (len(piece[0]) / count)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        pieces = list(zip(*(torch.split(tensor, rows) for tensor in batch), strict=True))
        return self.workers.run(backward, pieces)


def _in_words(seconds: float) -> str:
    """Format a duration."""
    minutes = seconds / 60
    if minutes >= 90:
        return f"{minutes / 60:.1f} hours"
    return f"{minutes:.0f} minutes" if minutes >= 2 else f"{seconds:.0f} s"
