"""Whole runs of `forerun train medusa` on the bundled target, as small as they can be."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from forerun import LLM, MedusaTree, SamplingParams
from forerun.config import BUNDLED_TARGET
from forerun.drafters.models.head_files.folder import load_head
from forerun.drafters.models.medusa.config import RANKS, MedusaConfig
from forerun.errors import ConfigError
from forerun.train.checkpoint import CHECKPOINT, LoopState, save_checkpoint
from forerun.train.heads.commands import PreparedRun, evaluate_head, prepare_head, train_head
from forerun.train.heads.options import MedusaShape, MedusaTraining
from forerun.train.heads.run import train
from forerun.train.loop import Loop
from forerun.train.medusa import MedusaHead, MedusaKind
from forerun.utils.files import locked, sealed_file

pytestmark = pytest.mark.usefixtures("few_timed_steps")
QUIET = Console(quiet=True)
TINY = MedusaTraining(
    shape=MedusaShape(num_heads=2, draft_vocab=200, sequential=True),
    max_steps=4,
    tokens_per_step=96,
    window=48,
    evaluate_every=0,
    held_out_rows=2,
    num_draft_tokens=2,
    checkpoint_seconds=1e9,
    threads=1,
    dtype="float32",
)


class Killed(Exception):
    pass


def write_answers(path: Path) -> Path:
    """Short answers."""
    rng = random.Random(0)
    with path.open("w") as file:
        for index in range(200):
            body = "\n".join(f"    value += {rng.randint(0, 9)}" for _ in range(3))
            line = {"text": f"def function_{index}(value):\n", "answer": f"{body}\n    return value\n", "temp": 0}
            file.write(json.dumps(line) + "\n")
    return path


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    folder = tmp_path_factory.mktemp("medusa")
    return prepare_head(BUNDLED_TARGET, write_answers(folder / "answers.jsonl"), folder, MedusaKind(TINY), QUIET)


def run(start: PreparedRun, folder: Path, options: MedusaTraining = TINY) -> tuple[dict[str, Tensor], LoopState]:
    assert isinstance(start.head.config, MedusaConfig)
    head = MedusaHead(start.head.config)
    start.kind.set_first_weights(head, torch.ones(1, 256), start.target.output_rows)
    state = train(head, start.target, start.rows, folder, MedusaKind(options), QUIET, None)
    return head.state_dict(), state


def test_a_killed_and_resumed_run_ends_with_the_same_weights(
    start: PreparedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, state = run(start, tmp_path / "whole")
    assert state.step == 4 and state.losses[-1] < state.losses[0]
    original = Loop._step

    def dying_step(self: Loop, batch, progress: float):
        if progress > 0.6:
            raise Killed
        found = original(self, batch, progress)
        if progress < 0.2:  # the checkpoint is older than the death: the steps between are lost and done again
            done = round(progress * 4) + 1
            save_checkpoint(self.folder, self.model, self.optimisers, LoopState(done, 96 * done))
        return found

    monkeypatch.setattr(Loop, "_step", dying_step)
    with pytest.raises(Killed):
        run(start, tmp_path / "killed")
    monkeypatch.setattr(Loop, "_step", original)
    resumed, _ = run(start, tmp_path / "killed")
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name
    with pytest.raises(ConfigError, match="step_weight"):
        run(start, tmp_path / "whole", replace(TINY, step_weight=1.0))


def test_a_loss_that_is_no_number_ends_the_run_and_leaves_the_checkpoint(start: PreparedRun, tmp_path: Path) -> None:
    run(start, tmp_path, replace(TINY, max_steps=1))
    (tmp_path / "options.json").unlink()
    state = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    state["model"]["blocks.1.layers.0.bias"][0] = float("nan")
    torch.save(state, tmp_path / "plain.pt")
    with sealed_file(tmp_path / CHECKPOINT, ConfigError) as file:
        file.write((tmp_path / "plain.pt").read_bytes())
    poisoned = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(ConfigError, match="no number"):
        run(start, tmp_path, replace(TINY, max_steps=2))
    assert (tmp_path / CHECKPOINT).read_bytes() == poisoned


def test_the_command_writes_heads_that_draft_with_their_card(start: PreparedRun, tmp_path: Path) -> None:
    out, work = tmp_path / "heads", tmp_path / "work"
    options = replace(TINY, max_steps=2, shape=replace(TINY.shape, sequential=False))
    command = "forerun train medusa"
    train_head(out, work, BUNDLED_TARGET, start.rows.folder, MedusaKind(options), command, resume=False, force=False)
    stored = load_head(out)
    assert isinstance(stored.config, MedusaConfig)
    assert len(stored.config.accuracies) == 2 * RANKS and max(stored.config.accuracies) > 0
    card, record = (out / "README.md").read_text(), json.loads((out / "training.json").read_text())
    assert "Medusa head" in card and "Overlap at temperature 1" in card and "speed-up" in card
    assert record["training"]["steps"] == 2 and record["held_out"]["documents"] > 0
    llm = LLM(start.inference_target, MedusaTree(out), num_draft_tokens=4)
    result: Any = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert result[0].stats.num_draft_tokens > 0
    with pytest.raises(ConfigError, match="holds another run"):
        train_head(out, work, BUNDLED_TARGET, start.rows.folder, MedusaKind(options), "", resume=False, force=False)
    with locked(work, ConfigError, wait=False), pytest.raises(ConfigError, match="in use by another process"):
        train_head(out, work, BUNDLED_TARGET, start.rows.folder, MedusaKind(options), "", resume=True, force=False)


def test_what_contradicts_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_draft_tokens is 6, but such a head drafts 5 tokens"):
        MedusaKind(MedusaTraining(num_draft_tokens=6))
    with pytest.raises(ConfigError, match="needs one output layer"):
        MedusaTraining(position_weights="d-pace", shape=MedusaShape(output_rows="each"))
    with pytest.raises(ConfigError, match="output_rows is 'mine'"):
        MedusaShape(output_rows="mine")


@pytest.mark.slow
def test_other_shapes_and_losses_train(start: PreparedRun, tmp_path: Path) -> None:
    for number, (shape, more) in enumerate(
        [
            (MedusaShape(num_heads=2, draft_vocab=200, output_rows="each", num_layers=2), {"loss": "hybrid"}),
            (MedusaShape(num_heads=2, draft_vocab=200, output_rows="one"), {"position_weights": "d-pace"}),
        ]
    ):
        options = replace(TINY, shape=shape, max_steps=1, **more)  # type: ignore[arg-type]
        place = tmp_path / f"{number}"
        train_head(
            place,
            tmp_path / f"{number}.run",
            BUNDLED_TARGET,
            start.rows.folder,
            MedusaKind(options),
            "",
            resume=False,
            force=False,
        )
        assert load_head(place).summary()["head"].count("output rows of their own") == 1
        report = evaluate_head(BUNDLED_TARGET, place, start.rows.folder, num_draft_tokens=2, new_tokens=8, threads=1)
        assert report.score.documents > 0
        with pytest.raises(ConfigError, match="2 heads draft no 3 tokens"):
            evaluate_head(BUNDLED_TARGET, place, start.rows.folder, num_draft_tokens=3, new_tokens=8, threads=1)


@pytest.mark.slow
def test_sigkill_at_any_moment_and_the_same_command_with_resume(tmp_path: Path) -> None:
    data = write_answers(tmp_path / "answers.jsonl")
    keys = """
[train.medusa]
target = "bundled"
draft_vocab = 200
num_heads = 2
max_steps = 40
tokens_per_step = 128
window = 64
evaluate_every = 10
held_out_rows = 2
num_draft_tokens = 2
checkpoint_seconds = 0.1
threads = 2
"""
    file = tmp_path / "keys.toml"
    file.write_text(keys)

    def command(name: str, *more: str) -> list[str]:
        return [
            sys.executable, "-m", "forerun", "--config", str(file), "train", "medusa", str(tmp_path / name),
            "--data", str(data), *more,
        ]  # fmt: skip

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command("whole"), check=True, timeout=300, env=environment)
    rng, more = random.Random(1), ("--force",)
    for _ in range(4):
        process = subprocess.Popen(command("killed", *more), env=environment)
        deadline = time.monotonic() + 120
        while not (tmp_path / "killed.run" / CHECKPOINT).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(rng.random())
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        more = ("--resume",)
    subprocess.run(command("killed", "--resume"), check=True, timeout=300, env=environment)
    whole, killed = (load_head(tmp_path / name).tensors for name in ("whole", "killed"))
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
