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
from forerun.train.checkpoint import CHECKPOINT, METRICS, LoopState, load_best, save_best, save_checkpoint
from forerun.train.needs import RunNeeds
from forerun.train.optim import Optimisers

Batch = tuple[Tensor, ...]
"""Tensors that agree in their first dimension; the first holds token ids, [rows, tokens + 1], or [rows, tokens] where
no next token is learnt."""

PROGRESS_SECONDS = 10.0
"""Between two lines of progress."""
EVALUATION_SECONDS = 600.0
"""Between two evaluations, at most."""
MOST_LOST_SECONDS = 110.0
"""Between two checkpoints, at most, unless more are allowed: a kill loses less than two minutes."""
TIMED_CALLS = 3
"""Times that steps are timed, at least, before the duration of the others is estimated by them."""
_TIMED_SHARE = 0.03
"""Share of a bounded time in which steps are timed, at least: the learning rate rises meanwhile anyhow."""
_OVERRUN = 1.5
"""Times the bounded time after which a run ends, whatever was decided."""
FIRST_LOSSES = 4
"""Steps whose loss is the start."""
RISEN_STEPS = 64
"""Steps in a row with a loss well above its start that end a run."""


class StageProgress:
    """The progress of a stage of a run while the block lasts: a bar on a terminal, elsewhere a line every ten seconds.

    Args:
        total, done: parts of the stage, and how many there are already.
        end: when it ends at the latest, on the clock of time.monotonic.
    """

    def __init__(self, console: Console, title: str, total: int, done: int = 0, *, end: float = math.inf) -> None:
        self._console = console
        self._title = title
        self._total = total
        self._end = end
        self._first = done
        self._done: float = done
        self._begun = 0.0
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

    def show(self, done: int, detail: str = "", tokens: int = 0, *, begun: float = 0.0, total: int = 0) -> None:
        """Show how many parts are done, what else there is to say, and the speed at which this took so many tokens.

        Args:
            begun: work on unfinished parts, in parts.
            total: of the parts, where that has changed.
        """
        speed = f"{tokens / (time.monotonic() - self._start):,.0f} tokens/s" if tokens else ""
        if total and total != self._total:
            self._total = total
            self._bar.update(self._task, total=total)
        self._done = done
        self._begun = begun
        self._detail = detail or speed
        self._bar.update(self._task, completed=done, now=self._now())

    def _now(self) -> str:
        spent = time.monotonic() - self._start
        new = self._done + self._begun - self._first
        left = (self._total - self._done - self._begun) * spent / new if new > 0 else math.inf
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
        every: steps between two of them; 0 for so many that there are `count`.
        patience: evaluations in a row without a better one after which the run ends; 0 to go on.
        count: of the whole schedule, wherever it ends.
    """

    score: Callable[[nn.Module], float]
    every: int = 0
    patience: int = 0
    count: int = 1

    def every_of(self, steps: int) -> int:
        """Return the steps between two of them in a schedule of so many."""
        return self.every or max(1, steps // self.count)

    def are_over(self, scores: list[tuple[int, float]]) -> bool:
        """Return whether they end the run."""
        values = [score for _, score in scores]
        return self.patience > 0 and len(values) > self.patience and max(values) not in values[-self.patience :]


@dataclass(slots=True)
class _TimedSteps:
    """The time that the steps of one call of `Loop.run` take, evaluations left out.

    Attributes:
        budget: seconds that they may take.
        deciding: they decide at which step the schedule ends.
        last: seconds of the last ones that were read together.
    """

    budget: float
    deciding: bool
    last: float = 0.0
    _spent: float = 0.0
    _calls: list[tuple[int, float]] = field(default_factory=list)
    _said: bool = False
    _decided: bool = False

    def add(self, count: int, seconds: float) -> None:
        """Count steps, and the seconds that they took together."""
        self.last = seconds
        self._spent += seconds
        if self.deciding or len(self._calls) < TIMED_CALLS:
            self._calls.append((count, seconds))

    @property
    def are_too_slow(self) -> bool:
        """Return whether they take much longer than was decided, or, of a run that goes on, longer than they may."""
        most = self.budget * (_OVERRUN if self._decided else 1)
        return not self.deciding and self._spent > most

    @property
    def _seconds(self) -> float:
        """Return the seconds of one step; the first ones are slower, and left out where there are others."""
        calls = self._calls[1:] or self._calls
        return sum(seconds for _, seconds in calls) / sum(count for count, _ in calls)

    def decides(self, state: LoopState, total: int) -> bool:
        """Decide at which step the schedule ends, when enough steps are timed; return whether that is now."""
        enough = len(self._calls) >= TIMED_CALLS and self._spent >= _TIMED_SHARE * self.budget
        if not self.deciding or (not enough and self._spent < self.budget):
            return False
        left = max(0.0, self.budget - self._spent)
        state.planned = min(total, state.step + int(left / self._seconds))
        self.deciding = False
        self._decided = True
        return True

    def say(self, left: int, console: Console) -> None:
        """Print once how long the remaining steps will take, when enough of them are timed and the end is decided."""
        if self._said or self.deciding or len(self._calls) < TIMED_CALLS or left <= 0:
            return
        self._said = True
        rest = _in_words(left * self._seconds)
        console.print(f"{left:,} more steps of {self._seconds:.2f} s: about {rest}", highlight=False)


@dataclass(slots=True)
class _Marks:
    """When a run last wrote a checkpoint and last evaluated, on the clock of time.monotonic.

    Attributes:
        saving: seconds that writing the checkpoint took.
        step: of the checkpoint.
        score: of the last evaluation, for lines of progress; empty before it.
    """

    saved: float
    evaluated: float
    saving: float = 0.0
    step: int = 0
    score: str = ""

    def are_due(self, every: float, step_seconds: float) -> bool:
        """Return whether a checkpoint is due before the next steps, which take so many seconds.

        What takes long to be written is written less often, so that writing takes a tenth of the time; but a kill
        loses no more than two minutes, or one step.
        """
        apart = max(every, min(10 * self.saving, MOST_LOST_SECONDS))
        return time.monotonic() - self.saved + step_seconds > apart


@dataclass(slots=True)
class Loop:
    """A training run of `total_steps` steps whose state lives in `folder`.

    With an `end`, the first steps are timed, and the number of steps that fit into the time until then, counted from
    the call of `run` and without evaluations, is decided and kept in a checkpoint: the schedule ends there, whatever
    the clock does later, so that a resumed run ends with the same weights.
    """

    folder: Path
    model: nn.Module
    optimisers: Optimisers
    total_steps: int
    batch: Callable[[int], Batch]
    """Step number -> its batch."""
    loss: Callable[[nn.Module, Batch, float], Tensor]
    """(model, rows of the batch, progress) -> their mean loss; progress in [0, 1)."""
    checkpoint_seconds: float
    workers: Workers
    evaluations: Evaluations | None = None
    end: float = math.inf
    """When training should end, on the clock of time.monotonic."""
    goes_on: bool = True
    """A run that time has ended can be gone on with."""
    says_needs: bool = True
    warmup_steps: int = 0
    """Steps over which the learning rate rises, where the schedule has no longer warm-up; half of the run at most."""
    logits: int = 0
    """Logits of a token that are in memory at once; for the estimate of the memory alone."""
    _ahead: Batch | None = field(default=None, init=False)
    """The batch of the next step, where it was needed before."""

    def run(self, state: LoopState, console: Console, title: str) -> LoopState:
        """Train from `state` to the end, or until interrupted; the last act is a checkpoint.

        With evaluations, the weights of the best of them are the model's in the end.

        Raises:
            ConfigError: the disk has too little room; a checkpoint cannot be written; loss or gradient are no numbers,
                or the loss rises above its start and stays there; more steps are asked of a finished run. The last
                checkpoint stays.
            KeyboardInterrupt: after Ctrl-C, when the step is done and saved.
        """
        if state.is_finished:
            self._check_finished(state)
            return state
        if state.step < self.total_steps and self.says_needs:
            self._say_needs(state, console)
        seconds = max(0.0, self.end - time.monotonic())
        is_unjudged = self.evaluations is not None and 0 < state.step == state.planned != self._judged(state)
        if state.planned <= state.step and not is_unjudged:
            state.planned = 0 if seconds < math.inf else self.total_steps
        state.planned = min(state.planned, self.total_steps)
        timed = _TimedSteps(seconds, state.planned == 0)
        self.model.train()
        with (
            HeldInterrupts() as held,
            StageProgress(console, title, self._last(state), state.step, end=self._shown_end(state)) as progress,
            (self.folder / METRICS).open("a") as metrics,
        ):
            marks = _Marks(time.monotonic(), time.monotonic(), step=state.step)
            if state.step:  # a kill may have come before its evaluation was done
                self._evaluate(state, metrics, marks)
            while not self._is_over(state, timed) and not held.pending:
                speed = self._several_steps(state, timed)
                is_decided = timed.decides(state, self.total_steps)
                timed.say(self._last(state) - state.step, console)
                self._evaluate(state, metrics, marks)
                self._show(state, progress, metrics, speed, marks)
                if is_decided or marks.are_due(self.checkpoint_seconds, timed.last):
                    self._save(state, marks)
            self._finish(state, console, title, interrupted=held.pending)
            interrupted = held.pending
        if interrupted:  # the handler of SIGINT may be one that raises nothing
            raise KeyboardInterrupt
        return state

    def _check_finished(self, state: LoopState) -> None:
        """Refuse to go on with a finished run, whose optimisers' state is not kept."""
        if state.step < self.total_steps and self.goes_on and not self._ended_early(state):
            raise ConfigError(
                f"The run in {self.folder} is finished after {state.step:,} steps, so it cannot go on to "
                f"{self.total_steps:,}. Begin anew by --force, or give another OUT."
            )

    def _say_needs(self, state: LoopState, console: Console) -> None:
        """Print what the run needs. Raises ConfigError where the disk has too little room."""
        self._ahead = self.batch(state.step)
        rows, width = self._ahead[0].shape
        where = device_of(self.model)
        needs = RunNeeds.of(
            self.model,
            self.optimisers,
            self.folder,
            replicas=len(self.workers.replicas),
            tokens=min(rows * (width - 1), MICRO_TOKENS[where.type] * self.workers.count),
            logits=self.logits,
            keeps_best=self.evaluations is not None,
        )
        needs.say(self.folder, console, where)

    def _judged(self, state: LoopState) -> int:
        """Return the step of the last evaluation that counts; 0 before the first."""
        return state.scores[-1][0] if state.scores else 0

    def _last(self, state: LoopState) -> int:
        """Return the step at which the schedule ends; before that is decided, the last of the whole run."""
        return state.planned or self.total_steps

    def _shown_end(self, state: LoopState) -> float:
        return math.inf if state.planned else self.end

    def _is_over(self, state: LoopState, timed: _TimedSteps) -> bool:
        """Return whether steps or time are over, or the evaluations end the run; one step is always done."""
        has_time = not state.step or (timed.budget > 0 and not timed.are_too_slow)
        return state.step >= self._last(state) or not has_time or self._ended_early(state)

    def _ended_early(self, state: LoopState) -> bool:
        return self.evaluations is not None and self.evaluations.are_over(state.scores)

    def _finish(self, state: LoopState, console: Console, title: str, *, interrupted: bool) -> None:
        """Write the last checkpoint, and say what is left where time has ended the run."""
        is_early = state.step < self.total_steps and not self._ended_early(state)
        ended = not is_early or not (self.goes_on or interrupted)
        if not ended:
            save_checkpoint(self.folder, self.model, self.optimisers, state)
        if interrupted and not ended:
            return
        if state.scores and state.best_step < state.step:
            load_best(self.folder, self.model, state.best_step)
        if ended:
            state.is_finished = True
            save_checkpoint(self.folder, self.model, self.optimisers, state)
        if not is_early:
            return
        steps = f"step {state.step:,} of {self.total_steps:,}"
        short = state.planned - state.step
        why = f", {short:,} before the end of its schedule" if short > 0 else ""
        size = (self.folder / CHECKPOINT).stat().st_size / 1e6
        line = f"{title}: ended by --minutes after {steps}{why}"
        if not ended:
            line += f"; --resume goes on (the {size:,.0f} MB of {self.folder / CHECKPOINT} are for that alone)"
        console.print(line, highlight=False, soft_wrap=True)

    def _save(self, state: LoopState, marks: _Marks) -> None:
        began = time.monotonic()
        save_checkpoint(self.folder, self.model, self.optimisers, state)
        marks.saved = time.monotonic()
        marks.saving = marks.saved - began
        marks.step = state.step

    def _show(self, state: LoopState, progress: StageProgress, metrics: TextIO, speed: float, marks: _Marks) -> None:
        recent = state.losses[-32:]
        detail = f"loss {sum(recent) / len(recent):.3f} · {speed:,.0f} tokens/s{marks.score}"
        progress.show(state.step, detail, total=self._last(state))
        entry = {"step": state.step, "loss": round(state.losses[-1], 4), "tokens_per_s": round(speed)}
        metrics.write(json.dumps(entry) + "\n")
        metrics.flush()

    def _evaluate(self, state: LoopState, metrics: TextIO, marks: _Marks) -> None:
        """Evaluate every so many steps and at the end of the schedule, and keep the weights if they are the best.

        Every ten minutes the score is shown in between. It is no candidate for the best then: which weights a run ends
        with does not depend on the clock. The checkpoint is as old as the best weights, and no step is lost by a kill
        meanwhile.
        """
        due = self.evaluations
        former = self._judged(state)
        if due is None or former == state.step:
            return
        every = due.every_of(self._last(state))
        counts = state.step // every != former // every or state.step >= self._last(state)
        if not counts and time.monotonic() - marks.evaluated < EVALUATION_SECONDS:
            return
        if marks.step != state.step:
            self._save(state, marks)
        self.model.eval()
        score = due.score(self.model)
        self.model.train()
        marks.evaluated = time.monotonic()
        marks.score = f" · score {score:.3f}"
        metrics.write(json.dumps({"step": state.step, "score": round(score, 4)}) + "\n")
        if counts:
            state.scores.append((state.step, score))
            if state.best_step == state.step:
                save_best(self.folder, self.model, state.step)
                self._save(state, marks)

    def _several_steps(self, state: LoopState, timed: _TimedSteps) -> float:
        """Do as many steps as losses are read at once; return their tokens per second."""
        started = time.monotonic()
        former = state.tokens
        values = []
        last = self._last(state)
        self.optimisers.warmup = min(0.5, self.warmup_steps / last)
        count = min(LOSSES_READ_EVERY[device_of(self.model).type], last - state.step)
        for step in range(state.step, state.step + count):
            batch = self.batch(step) if self._ahead is None else self._ahead
            self._ahead = None
            values.append(self._step(batch, step / last))
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
        timed.add(count, seconds)
        self._check_loss(state)
        return (state.tokens - former) / seconds

    def _check_loss(self, state: LoopState) -> None:
        """Remember the first losses. Raises ConfigError where the last ones have left them behind, upwards."""
        if not state.first_loss and FIRST_LOSSES <= len(state.losses) == state.step:
            state.first_loss = sum(state.losses[:FIRST_LOSSES]) / FIRST_LOSSES
        lowest = min(state.losses[-RISEN_STEPS:])
        if not state.first_loss or len(state.losses) < RISEN_STEPS or lowest <= 1.2 * state.first_loss + 0.3:
            return
        raise ConfigError(
            f"The loss has left its start behind: {state.first_loss:.2f} in the first {FIRST_LOSSES} steps, and "
            f"{lowest:.2f} or more in the last {RISEN_STEPS}. Such runs do not recover. Begin anew by --force with a "
            f"lower learning rate than {self.optimisers.options.adam_lr:g}."
        )

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
