from __future__ import annotations

import io
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from forerun.errors import ConfigError
from forerun.train import defaults, loop
from forerun.train.checkpoint import BEST, CHECKPOINT, METRICS, LoopState, load_best, load_checkpoint, save_checkpoint
from forerun.train.corpus import SourceFile
from forerun.train.defaults import Optimisation, rate_for_width
from forerun.train.loop import Evaluations, Loop, StageProgress, Workers
from forerun.train.needs import RunNeeds
from forerun.train.optim import Float32Muon, Optimisers
from forerun.utils.machine import resident_memory
from tools import lm

from .conftest import SHORT_RUN

QUIET = Console(quiet=True)


class Killed(Exception):
    pass


def test_a_killed_and_resumed_run_ends_with_the_same_weights(
    files: list[SourceFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _, state = lm.train(files, tmp_path / "whole", SHORT_RUN, QUIET)
    steps = state.step

    original = Loop._step

    def dying_step(self: Loop, batch, progress: float) -> float:
        if progress >= 0.5:
            raise Killed
        loss = original(self, batch, progress)
        if progress < 3 / 8:  # the checkpoint is older than the death: the steps between are lost and done again
            saved.append(1)
            state = LoopState(len(saved), len(saved) * 128, 0.0, [])
            save_checkpoint(self.folder, self.model, self.optimisers, state)
        return loss

    saved: list[int] = []
    monkeypatch.setattr(Loop, "_step", dying_step)
    with pytest.raises(Killed):
        lm.train(files, tmp_path / "killed", SHORT_RUN, QUIET)
    monkeypatch.setattr(Loop, "_step", original)
    resumed, _, state = lm.train(files, tmp_path / "killed", SHORT_RUN, QUIET)

    assert len(saved) == 3 and state.step == steps == 8
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_training_lowers_the_loss_and_leaves_no_half_written_checkpoint(
    files: list[SourceFile], tmp_path: Path
) -> None:
    _, _, state = lm.train(files, tmp_path, SHORT_RUN, QUIET)
    assert state.losses[-1] < state.losses[0]
    assert (tmp_path / CHECKPOINT).exists() and not list(tmp_path.glob("*.tmp"))


class Clock:
    """A clock that moves only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.seconds = 1.0
        self.seen: list[float] = []
        clock = SimpleNamespace(monotonic=lambda: self.now)
        for module in (loop, defaults):
            monkeypatch.setattr(module, "time", clock)
        original = Loop._step

        def step(running: Loop, batch: Any, progress: float) -> Any:
            self.seen.append(progress)
            self.now += self.seconds
            return original(running, batch, progress)

        monkeypatch.setattr(Loop, "_step", step)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_minutes_end_a_run_and_its_schedule(files: list[SourceFile], tmp_path: Path, clock: Clock) -> None:
    bounded = replace(SHORT_RUN, tokens=40 * 128, minutes=6 / 60)
    _, _, state = lm.train(files, tmp_path, bounded, QUIET)
    assert state.step == state.planned == 6 and state.seconds == clock.now == 6
    assert clock.seen == [0, 1 / 40, 2 / 40, 3 / 6, 4 / 6, 5 / 6]
    assert lm.train(files, tmp_path, replace(bounded, tokens=1024, minutes=None), QUIET)[2].step == 8


def test_a_bounded_run_ends_with_the_same_weights_whatever_the_clock_does(
    files: list[SourceFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    bounded = replace(SHORT_RUN, tokens=40 * 128, minutes=7 / 60)
    whole, _, state = lm.train(files, tmp_path / "whole", bounded, QUIET)
    monkeypatch.setattr(Optimisers, "step", raise_at(5, Optimisers.step))
    with pytest.raises(Killed):
        lm.train(files, tmp_path / "killed", bounded, QUIET)
    clock.seconds = 0.1
    resumed, _, again = lm.train(files, tmp_path / "killed", bounded, QUIET)
    assert again.step == again.planned == state.planned == 7
    assert all(torch.equal(tensor, resumed.state_dict()[name]) for name, tensor in whole.state_dict().items())


def raise_at(count: int, original: Any) -> Any:
    """Return a function that calls another one, and is killed once, at a call of this number."""
    calls: list[int] = []

    def call(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == count:
            raise Killed
        return original(*arguments)

    return call


def test_a_run_whose_steps_become_slower_ends_and_goes_on(
    files: list[SourceFile], tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded = replace(SHORT_RUN, tokens=40 * 128, minutes=10 / 60)
    whole, _, _ = lm.train(files, tmp_path / "whole", bounded, QUIET)
    original = Optimisers.step

    def slower(self: Optimisers, *arguments: Any) -> Any:
        clock.now += 3 if len(clock.seen) % 10 > 3 else 0
        return original(self, *arguments)

    monkeypatch.setattr(Optimisers, "step", slower)
    console = Console(file=io.StringIO())
    _, _, state = lm.train(files, tmp_path / "slow", bounded, console)
    assert state.step < state.planned == 10
    assert "before the end of its schedule; --resume goes on" in console.file.getvalue()  # type: ignore[attr-defined]
    monkeypatch.setattr(Optimisers, "step", original)
    resumed, _, again = lm.train(files, tmp_path / "slow", bounded, QUIET)
    assert again.step == 10
    assert all(torch.equal(tensor, resumed.state_dict()[name]) for name, tensor in whole.state_dict().items())


def part_of_a_run(folder: Path, steps: int = 4, **more: Any) -> Loop:
    """Return a loop over a matrix, which is learnt to be small."""
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    model = torch.nn.Linear(8, 8, bias=False)

    def loss(module: Any, rows: Any, progress: float) -> Any:
        return module(rows[0].float()[:, :8]).square().mean()

    return Loop(
        folder=folder,
        model=model,
        optimisers=Optimisers(model, Optimisation()),
        total_steps=steps,
        batch=lambda step: (torch.ones(1, 9, dtype=torch.int64),),
        loss=loss,
        checkpoint_seconds=1e9,
        workers=Workers(model, 1),
        **more,
    )


def test_evaluations_take_no_minutes_and_are_shown_every_ten(tmp_path: Path, clock: Clock) -> None:
    clock.seconds = 200.0
    at: list[float] = []

    def score(_: Any) -> float:
        at.append(len(clock.seen))
        clock.now += 5_000
        return float(len(at))

    run = part_of_a_run(tmp_path, 1_000, evaluations=Evaluations(score, 500), end=2_000.0)
    state = run.run(LoopState(), QUIET, "training")
    assert state.step == state.planned == 10 and at == [3, 6, 9, 10]
    assert state.scores == [(10, 4.0)]  # which weights are the best does not depend on the clock
    scores = [line for line in (tmp_path / METRICS).read_text().splitlines() if "score" in line]
    assert len(scores) == 4


def closeness(model: Any) -> float:
    """Score a matrix of `part_of_a_run`."""
    return -float(model(torch.ones(8)).square().mean().detach())


@pytest.mark.parametrize("number", [2, 4])
def test_a_kill_during_an_evaluation_loses_no_step(tmp_path: Path, number: int) -> None:
    whole = part_of_a_run(tmp_path / "whole", evaluations=Evaluations(closeness, 1))
    state = whole.run(LoopState(), QUIET, "training")
    killed = part_of_a_run(tmp_path / "killed", evaluations=Evaluations(raise_at(number, closeness), 1))
    with pytest.raises(Killed):
        killed.run(LoopState(), QUIET, "training")
    again = part_of_a_run(tmp_path / "killed", evaluations=Evaluations(closeness, 1))
    found = load_checkpoint(tmp_path / "killed", again.model, again.optimisers)
    assert found.step == number and found.best_step <= number - 1
    assert again.run(found, QUIET, "training").scores == state.scores
    assert torch.equal(again.model.weight, whole.model.weight)  # type: ignore[arg-type]


def test_the_checkpoint_knows_of_the_best_weights(tmp_path: Path, clock: Clock) -> None:
    scores = iter([1.0, 3.0, 2.0])
    run = part_of_a_run(tmp_path, 3, evaluations=Evaluations(lambda _: next(scores), 1), end=100.0)
    original = run.loss

    def dying(model: Any, rows: Any, progress: float) -> Any:
        if progress > 0.5:
            raise Killed
        return original(model, rows, progress)

    run.loss = dying
    with pytest.raises(Killed):
        run.run(LoopState(), QUIET, "training")
    again = part_of_a_run(tmp_path, 3)
    found = load_checkpoint(tmp_path, again.model, again.optimisers)
    assert found.scores == [(1, 1.0), (2, 3.0)]
    load_best(tmp_path, again.model, found.best_step)
    with pytest.raises(ConfigError, match=r"it is of step 2, not 3\. Remove it and .*checkpoint\.pt, and --resume"):
        load_best(tmp_path, again.model, 3)


def test_a_run_whose_time_is_over_goes_no_further(tmp_path: Path, clock: Clock) -> None:
    for former, steps in ((LoopState(3, planned=10), 3), (LoopState(3), 3), (LoopState(), 1)):
        state = part_of_a_run(tmp_path, 100, end=-5.0).run(former, QUIET, "training")
        assert state.step == steps


def test_the_step_at_which_time_ends_is_no_candidate_for_the_best(tmp_path: Path, clock: Clock) -> None:
    run = part_of_a_run(tmp_path, 100, evaluations=Evaluations(closeness, 500), end=2.5)
    state = run.run(LoopState(3, planned=20), QUIET, "training")
    assert state.step == 6 and not state.scores


def test_there_are_as_many_evaluations_wherever_the_schedule_ends(tmp_path: Path, clock: Clock) -> None:
    run = part_of_a_run(tmp_path, 1_000, evaluations=Evaluations(closeness, count=4), end=16.0)
    assert [step for step, _ in run.run(LoopState(), QUIET, "training").scores] == [4, 8, 12, 16]


def test_what_nothing_goes_on_with_is_finished_when_its_time_is_over(tmp_path: Path, clock: Clock) -> None:
    console = Console(file=io.StringIO(), width=500)
    run = part_of_a_run(tmp_path, 100, evaluations=Evaluations(closeness, count=4), end=4.0, goes_on=False)
    state = run.run(LoopState(), console, "imitation")
    assert state.is_finished and state.step == 4 and not (tmp_path / BEST).exists()
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "imitation: ended by --minutes after step 4 of 100" in printed and "--resume" not in printed
    again = part_of_a_run(tmp_path, 100, goes_on=False)
    found = load_checkpoint(tmp_path, again.model, again.optimisers)
    assert again.run(found, QUIET, "imitation").step == 4


def test_of_a_finished_run_the_weights_alone_are_kept(tmp_path: Path) -> None:
    scores = iter([3.0, 1.0])
    run = part_of_a_run(tmp_path, 2, evaluations=Evaluations(lambda _: next(scores), 1))
    state = run.run(LoopState(), QUIET, "training")
    assert state.is_finished and state.best_step == 1
    assert not (tmp_path / BEST).exists()
    again = part_of_a_run(tmp_path, 2)
    found = load_checkpoint(tmp_path, again.model, again.optimisers)
    assert found == state and not again.optimisers._all[0][0].state
    assert again.run(found, QUIET, "training") is found
    assert torch.equal(again.model.weight, run.model.weight)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is finished after 2 steps, so it cannot go on to 3"):
        part_of_a_run(tmp_path, 3).run(found, QUIET, "training")


def test_a_loss_that_leaves_its_start_behind_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for first, later in ((7.5, 10.9), (7.5, 9.0), (0.5, 0.8)):
        losses = iter([first] * loop.FIRST_LOSSES + [later] * 200)

        def step(_: Loop, batch: Any, progress: float, values: Any = losses) -> Any:
            return next(values), 0.0

        monkeypatch.setattr(Loop, "_step", step)
        run = part_of_a_run(tmp_path, 100)
        if later < 10:
            assert run.run(LoopState(), QUIET, "training").step == 100
        else:
            with pytest.raises(
                ConfigError, match=r"left its start behind: 7\.50 in .* and 10\.90 or more in the last 64"
            ):
                run.run(LoopState(), QUIET, "training")


def test_warm_up_takes_as_many_steps_whatever_the_minutes(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []
    run = part_of_a_run(tmp_path, 1_000, end=100.0, warmup_steps=40)
    original = Optimisers.step

    def step(self: Optimisers, *arguments: Any) -> Any:
        found = original(self, *arguments)
        rates.append(self._all[0][0].param_groups[0]["lr"] / self.options.muon_lr)
        return found

    monkeypatch.setattr(Optimisers, "step", step)
    run.run(LoopState(), QUIET, "training")
    assert len(rates) == 100 and rates[:40] == pytest.approx([max(step / 40, 0.01) for step in range(40)])
    assert max(rates) <= 1 and rates[-1] < 0.1


@pytest.mark.parametrize(
    ("since", "step_seconds", "saving", "is_due"),
    [(50, 5, 1, False), (58, 5, 1, True), (30, 40, 0, True), (62, 5, 8, False), (85, 5, 8, True), (106, 5, 60, True)],
)
def test_a_kill_loses_two_minutes_at_most(
    clock: Clock, since: float, step_seconds: float, saving: float, is_due: bool
) -> None:
    marks = loop._Marks(0.0, 0.0, saving)
    clock.now = since
    assert marks.are_due(60.0, step_seconds) == is_due


def test_a_disk_without_room_is_told_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=500)
    part_of_a_run(tmp_path / "enough", 1).run(LoopState(), console, "training")
    assert re.match(
        r"memory about \d+\.\d\d GB: .* in use now, gradients 0\.00, optimiser 0\.00, .* free.* · disk 0\.00 GB in ",
        console.file.getvalue(),  # type: ignore[attr-defined]
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(
        ConfigError,
        match=r"has too little room: checkpoints, labels and the result need .* Make room there, or give an OUT",
    ):
        part_of_a_run(tmp_path / "full").run(LoopState(), QUIET, "training")
    assert not (tmp_path / "full" / CHECKPOINT).exists()


def test_needs_grow_with_what_is_trained(tmp_path: Path) -> None:
    model = torch.nn.Linear(10, 100, bias=False)
    options = {"replicas": 2, "tokens": 7, "logits": 5, "keeps_best": True}
    for matrices, moments in (("muon", 1), ("adam", 2)):
        optimisers = Optimisers(model, Optimisation(matrices=matrices))
        needs = RunNeeds.of(model, optimisers, tmp_path, **options)  # type: ignore[arg-type]
        assert (needs.gradients, needs.optimiser) == (8_000, 4_000 * moments)
        assert needs.activations == 2 * 4 * 7 * (80 + 5)
        assert needs.checkpoints == 4_000 * (2 + moments) and needs.written == 4_000 * (4 + 2 * moments)
    (tmp_path / CHECKPOINT).write_bytes(bytes(12_000))
    assert RunNeeds.of(model, optimisers, tmp_path, **options).written == 32_000 - 12_000  # type: ignore[arg-type]
    assert resident_memory() > 0


@pytest.mark.parametrize(("width", "rate"), [(64, 3e-3), (576, 3e-3), (896, 1.9e-3), (2560, 6.8e-4), (30_000, 1e-4)])
def test_wide_matrices_get_a_lower_rate(width: int, rate: float) -> None:
    assert rate_for_width(width, 3e-3) == rate
    assert rate_for_width(width, 5e-5) <= 5e-5


def test_a_pipe_gets_lines_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PROGRESS_SECONDS", 0.05)
    pipe, terminal = (Console(file=io.StringIO(), force_terminal=each) for each in (False, True))
    for console in (pipe, terminal):
        with StageProgress(console, "training", 1_000) as progress:
            time.sleep(0.12)
            progress.show(250, "loss 2.000")
            time.sleep(0.12)
    lines = pipe.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == "training: 0 of 1,000"
    assert lines[-1].startswith("training: 250 of 1,000 · loss 2.000 · about ") and lines[-1].endswith(" s left")
    with StageProgress(pipe, "answers", 1_000) as progress:
        time.sleep(0.02)
        progress.show(0, tokens=100, begun=2.5)  # none is finished yet
        time.sleep(0.1)
    assert re.match(r"answers: 0 of 1,000 · .* tokens/s · about .* left", pipe.file.getvalue().splitlines()[-1])  # type: ignore[attr-defined]
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "loss 2.000" in shown and "of 1,000" not in shown


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_muon_in_float32_is_pytorchs(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    first = torch.randn(shape)
    ours, theirs = (torch.nn.Parameter(first.clone()) for _ in range(2))
    optimisers = [kind([each], lr=0.1) for kind, each in ((Float32Muon, ours), (torch.optim.Muon, theirs))]
    for _ in range(3):
        ours.grad = theirs.grad = torch.randn(shape)
        for each in optimisers:
            each.step()
    assert torch.allclose(ours, theirs, atol=0.01) and not torch.allclose(ours, first, atol=0.1)
    optimisers[1].load_state_dict(optimisers[0].state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_a_quick_processor_gets_muon_in_bfloat16(dtype: torch.dtype) -> None:
    kinds = {type(each) for each, _ in Optimisers(torch.nn.Linear(2, 2), Optimisation(), dtype)._all}
    assert (Float32Muon in kinds) == (dtype == torch.float32) and len(kinds) == 2


def test_several_workers_compute_the_gradient_of_one(files: list[SourceFile], tmp_path: Path) -> None:
    weights = []
    for threads in (1, 2):
        options = replace(SHORT_RUN, threads=threads, tokens=2 * 128)
        model, _, _ = lm.train(files, tmp_path / str(threads), options, QUIET)
        weights.append(model.state_dict()["model.embed_tokens.weight"])
    assert torch.allclose(*weights, atol=2e-3)
