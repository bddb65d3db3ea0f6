"""Whole runs of `forerun train eagle` on the bundled target, as small as they can be."""

from __future__ import annotations

import copy
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from forerun.config import BUNDLED_TARGET
from forerun.drafters.models.eagle.model import EagleModel
from forerun.drafters.models.head_files.folder import load_head
from forerun.errors import ConfigError
from forerun.train.checkpoint import CHECKPOINT, LoopState, save_checkpoint
from forerun.train.eagle import EagleHead, EagleKind
from forerun.train.heads.commands import PreparedRun, measure, prepare_head, train_head
from forerun.train.heads.evaluate import HeldOut
from forerun.train.heads.options import EagleShape, EagleTraining
from forerun.train.heads.run import train
from forerun.train.loop import Loop
from forerun.utils.files import locked, sealed_file

pytestmark = pytest.mark.usefixtures("few_timed_steps")
QUIET = Console(quiet=True)
TINY = EagleTraining(
    shape=EagleShape(draft_vocab=200, intermediate_size=32, layers="2,8,16"),
    max_steps=4,
    tokens_per_step=96,
    window=48,
    evaluate_every=2,
    held_out_rows=1,
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
    folder = tmp_path_factory.mktemp("eagle")
    return prepare_head(BUNDLED_TARGET, write_answers(folder / "answers.jsonl"), folder, EagleKind(TINY), QUIET)


def fresh(start: PreparedRun) -> EagleHead:
    head = EagleHead(start.head.config)
    start.kind.set_first_weights(head, torch.ones(1, 256), start.target.output_rows)
    return head


def run(start: PreparedRun, folder: Path, options: EagleTraining = TINY) -> tuple[dict[str, Tensor], LoopState]:
    head = fresh(start)
    during = HeldOut(
        start.target, start.rows.held_out(), options.held_out_rows, start.vocabulary, 2, start.kind.predict
    )

    def score(head: EagleHead) -> float:
        return during.score(head).expected_length

    state = train(head, start.target, start.rows, folder, EagleKind(options), QUIET, score)
    return head.state_dict(), state


def test_a_killed_and_resumed_run_ends_with_the_same_weights(
    start: PreparedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, state = run(start, tmp_path / "whole")
    assert state.step == 4 and len(state.scores) == 2 and state.losses[-1] < state.losses[0]
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
    resumed, again = run(start, tmp_path / "killed")
    assert again.scores == state.scores
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name
    with pytest.raises(ConfigError, match="learning_rate"):
        run(start, tmp_path / "whole", replace(TINY, learning_rate=1.0))


def test_a_loss_that_is_no_number_ends_the_run_and_leaves_the_checkpoint(start: PreparedRun, tmp_path: Path) -> None:
    run(start, tmp_path, replace(TINY, max_steps=1))
    before = (tmp_path / CHECKPOINT).read_bytes()
    (tmp_path / "options.json").unlink()
    state = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    state["model"]["midlayer.hidden_norm.weight"][0] = float("nan")
    torch.save(state, tmp_path / CHECKPOINT)
    with sealed_file(tmp_path / CHECKPOINT, ConfigError) as file:
        torch.save(state, tmp_path / "plain.pt")
        file.write((tmp_path / "plain.pt").read_bytes())
    poisoned = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(ConfigError, match="no number"):
        run(start, tmp_path, replace(TINY, max_steps=2))
    assert (tmp_path / CHECKPOINT).read_bytes() == poisoned != before


def test_a_run_that_is_out_of_time_ends_with_its_schedule_and_an_evaluation(start: PreparedRun, tmp_path: Path) -> None:
    head, console = fresh(start), Console(file=io.StringIO())
    scores = []

    def score(head: EagleHead) -> float:
        scores.append(1.0)
        return 1.0

    kind = EagleKind(replace(TINY, evaluate_every=3))
    state = train(head, start.target, start.rows, tmp_path, kind, console, score, time.monotonic())
    assert state.step == 1 and state.scores == [(1, 1.0)] and (tmp_path / CHECKPOINT).exists()
    assert "ended by --minutes after step 1 of 4; --resume goes on" in console.file.getvalue()  # type: ignore[attr-defined]
    assert train(head, start.target, start.rows, tmp_path, kind, QUIET, score).step == 4


def test_a_run_ends_by_its_evaluations_with_the_best_weights(start: PreparedRun, tmp_path: Path) -> None:
    scores = iter([1.2, 1.5, 1.4, 1.5, 1.3, 1.6])
    kept: list[dict[str, Tensor]] = []

    def falling(head: EagleHead) -> float:
        kept.append({name: tensor.clone() for name, tensor in head.state_dict().items()})
        return next(scores)

    head = fresh(start)
    options = replace(TINY, evaluate_every=1, patience=1)
    state = train(head, start.target, start.rows, tmp_path, EagleKind(options), QUIET, falling)
    assert [score for _, score in state.scores] == [1.2, 1.5, 1.4] and state.best_step == 2
    assert all(torch.equal(tensor, kept[1][name]) for name, tensor in head.state_dict().items())


def test_the_command_writes_a_head_that_drafts_with_its_card(start: PreparedRun, tmp_path: Path) -> None:
    out, work = tmp_path / "head", tmp_path / "work"
    options = replace(TINY, max_steps=1, evaluate_every=0, dtype="bfloat16")
    train_head(
        out,
        work,
        BUNDLED_TARGET,
        start.rows.folder,
        EagleKind(options),
        "forerun train eagle",
        resume=False,
        force=False,
    )
    stored = load_head(out)
    assert stored.config.layers == (2, 8, 16) and len(stored.tensors["norm.weight"]) == 256
    EagleModel(stored, start.inference_target)
    card = (out / "README.md").read_text()
    assert "EAGLE-3 head" in card and "Predicted speed-up" in card
    record = json.loads((out / "training.json").read_text())
    assert record["training"]["steps"] == 1 and record["held_out"]["documents"] > 0
    assert record["options"]["dtype"] == "bfloat16"
    head = copy.deepcopy(start.head)
    state = train(head, start.target, start.rows, tmp_path / "float32", EagleKind(options), QUIET, None)
    assert state.losses[0] == pytest.approx(record["training"]["final_loss"], rel=0.01)
    with pytest.raises(ConfigError, match="holds another run"):
        train_head(out, work, BUNDLED_TARGET, start.rows.folder, EagleKind(options), "", resume=False, force=False)
    with locked(work, ConfigError, wait=False), pytest.raises(ConfigError, match="in use by another process"):
        train_head(out, work, BUNDLED_TARGET, start.rows.folder, EagleKind(options), "", resume=True, force=False)


@pytest.mark.slow
def test_other_versions_and_losses_train(start: PreparedRun, tmp_path: Path) -> None:
    for number, (shape, more) in enumerate(
        [
            (EagleShape(version=1, draft_vocab=200, intermediate_size=32), {"feature_weight": 1.0, "loss": "hybrid"}),
            (EagleShape(draft_vocab=200, intermediate_size=32, own_output_rows=True), {"loss": "total-variation"}),
        ]
    ):
        options = replace(TINY, shape=shape, max_steps=1, **more)
        made = prepare_head(BUNDLED_TARGET, start.rows.folder, tmp_path / f"{number}", EagleKind(options), QUIET)
        state = train(made.head, made.target, made.rows, tmp_path / f"{number}", made.kind, QUIET, None)
        assert state.step == 1
        held_out = HeldOut(made.target, made.rows.held_out(), 2, made.vocabulary, 2, made.kind.predict)
        assert len(measure(made, held_out, 2).speedups) == 2


@pytest.mark.slow
def test_sigkill_at_any_moment_and_the_same_command_with_resume(tmp_path: Path) -> None:
    data = write_answers(tmp_path / "answers.jsonl")
    keys = """
[train.eagle]
target = "bundled"
draft_vocab = 200
intermediate_size = 32
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
            sys.executable, "-m", "forerun", "--config", str(file), "train", "eagle", str(tmp_path / name),
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


def test_states_on_disk_are_bounded_and_change_no_weight(start: PreparedRun, tmp_path: Path) -> None:
    options = replace(TINY, max_steps=1, evaluate_every=0)
    computed, _ = run(start, tmp_path / "computed", options)
    for name, gigabytes in (("all", 1.0), ("few", 8e-5)):
        options = replace(options, cached_states=gigabytes)
        for _ in range(2):  # the second time they are read
            found, _ = run(start, tmp_path / name, options)
            (tmp_path / name / CHECKPOINT).unlink()
            assert all(torch.equal(tensor, found[key]) for key, tensor in computed.items())
        files = list((tmp_path / name / "states").glob("row-*"))
        assert 0 < sum(path.stat().st_size for path in files) <= gigabytes * 1e9
    assert len(files) == 1
