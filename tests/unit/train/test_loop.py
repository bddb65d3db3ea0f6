from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from forerun.train import loop
from forerun.train.checkpoint import CHECKPOINT, LoopState, save_checkpoint
from forerun.train.corpus import SourceFile
from forerun.train.defaults import Optimisation
from forerun.train.loop import Loop, StageProgress
from forerun.train.optim import Float32Muon, Optimisers
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


def test_minutes_end_a_run_and_its_schedule(files: list[SourceFile], tmp_path: Path) -> None:
    seen: list[float] = []
    original = Loop._step

    def step(self: Loop, batch, progress: float):
        seen.append(progress)
        time.sleep(0.1)
        return original(self, batch, progress)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_step", step)
        bounded = replace(SHORT_RUN, tokens=40 * 128, minutes=0.5 / 60)
        _, _, state = lm.train(files, tmp_path, bounded, QUIET)
    assert 1 < state.step < 8 and (tmp_path / CHECKPOINT).exists()
    assert seen == sorted(seen) and 0.5 < seen[-1] < 1
    assert lm.train(files, tmp_path, replace(bounded, tokens=1024, minutes=None), QUIET)[2].step == 8


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
