"""Whole runs of `forerun train block` on the bundled target, as small as they can be."""

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

from forerun import LLM, Block, SamplingParams
from forerun.config import ASSETS, BUNDLED_TARGET
from forerun.drafters.models.head_files.folder import load_head
from forerun.errors import ConfigError
from forerun.train.block import BlockKind
from forerun.train.checkpoint import CHECKPOINT, LoopState, save_checkpoint
from forerun.train.heads.commands import PreparedRun, evaluate_head, prepare_head, train_head
from forerun.train.heads.evaluate import HeldOut
from forerun.train.heads.options import BlockShape, BlockTraining
from forerun.train.heads.run import train
from forerun.train.loop import Loop

GATE = "midlayer.mlp.gate_proj.weight"
pytestmark = pytest.mark.usefixtures("few_timed_steps")
QUIET = Console(quiet=True)
TINY = BlockTraining(
    shape=BlockShape(
        block_size=3,
        num_layers=1,
        draft_vocab=200,
        intermediate_size=32,
        layers="2,8,16",
        markov_rank=4,
        confidence=True,
    ),
    max_steps=4,
    tokens_per_step=96,
    window=48,
    anchors=9,
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
    folder = tmp_path_factory.mktemp("block")
    return prepare_head(BUNDLED_TARGET, write_answers(folder / "answers.jsonl"), folder, BlockKind(TINY), QUIET)


def run(start: PreparedRun, folder: Path, options: BlockTraining = TINY) -> tuple[dict[str, Tensor], LoopState]:
    kind = BlockKind(options)
    head = kind.module(start.head.config)  # type: ignore[arg-type]
    kind.set_first_weights(head, torch.ones(1, 256), start.target.output_rows)
    during = HeldOut(start.target, start.rows.held_out(), options.held_out_rows, start.vocabulary, 2, kind.predict)

    def score(head: Any) -> float:
        return during.score(head).expected_length

    state = train(head, start.target, start.rows, folder, kind, QUIET, score)
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
    with pytest.raises(ConfigError, match="anchors"):
        run(start, tmp_path / "whole", replace(TINY, anchors=5))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("reads_tokens", [False, True])
def test_the_command_writes_a_head_that_drafts_with_its_card(
    reads_tokens: bool, start: PreparedRun, tmp_path: Path
) -> None:
    out, work = tmp_path / "head", tmp_path / "work"
    shape = replace(TINY.shape, context_tokens=reads_tokens)
    options = replace(TINY, shape=shape, max_steps=1, evaluate_every=0)
    train_head(
        out,
        work,
        BUNDLED_TARGET,
        start.rows.folder,
        BlockKind(options),
        "forerun train block",
        resume=False,
        force=False,
    )
    stored = load_head(out)
    assert stored.config.layers == (2, 8, 16) and stored.config.kind == "block-3"
    assert stored.config.context_tokens == reads_tokens  # type: ignore[attr-defined]
    card = (out / "README.md").read_text()
    assert "block-3 head" in card and "Predicted speed-up" in card
    record = json.loads((out / "training.json").read_text())
    assert record["training"]["steps"] == 1 and record["held_out"]["documents"] > 0
    result: Any = LLM("bundled", Block(out), num_draft_tokens=3).generate([1, 2, 3], SamplingParams(max_tokens=5))
    assert result.stats.num_draft_tokens > 0
    report = evaluate_head(BUNDLED_TARGET, out, start.rows.folder, num_draft_tokens=3, new_tokens=8)
    assert len(report.speedups) == 3 and report.score.documents > 0


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_draft_tokens is 5, but such a head drafts 3 tokens"):
        BlockKind(BlockTraining(shape=BlockShape(block_size=3), num_draft_tokens=5))
    with pytest.raises(ConfigError, match="only a head with context_tokens has the layer of an EAGLE head"):
        BlockKind(BlockTraining(start="head"))
    with pytest.raises(ConfigError, match="position_weights is 'steep', but must be one of decay, d-pace"):
        BlockTraining(position_weights="steep")
    with pytest.raises(ConfigError, match="layers is 'a'"):
        BlockShape(layers="a")


def test_a_head_that_reads_tokens_begins_as_an_eagle_head(start: PreparedRun) -> None:
    """As the one that is shipped, with the channels of the largest weights where fewer are asked for."""
    eagle = load_head(ASSETS / "heads" / "eagle" / "bundled")
    for width in (704, 40):
        shape = BlockShape(block_size=3, context_tokens=True, intermediate_size=width, markov_rank=2, draft_vocab=200)
        kind = BlockKind(BlockTraining(shape=shape, start=str(ASSETS / "heads" / "eagle" / "bundled")))
        config = kind.config(BUNDLED_TARGET, start.inference_target, 48)
        head = kind.module(config)
        kind.set_first_weights(head, torch.randn(9, 256), torch.randn(200, 256))
        found = {name: parameter.detach() for name, parameter in head.named_parameters()}
        own = {name for name in found if name.startswith(("slot_", "markov_head"))}
        assert len(own) == 4 and found.keys() - own == eagle.tensors.keys()
        for name, tensor in eagle.tensors.items():
            if ".mlp." not in name or width == 704:
                assert torch.equal(found[name], tensor), name
        assert torch.count_nonzero(found["slot_states.weight"][0]) == 0
    gate, up, down = (eagle.tensors[f"midlayer.mlp.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
    kept = [channel for channel in range(704) if any(torch.equal(gate[channel], row) for row in found[GATE])]
    sizes = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    assert sorted(sizes.topk(40).indices.tolist()) == kept
    assert torch.equal(down[:, kept], found["midlayer.mlp.down_proj.weight"])


@pytest.mark.parametrize(
    ("shape", "folder", "said"),
    [
        ({"intermediate_size": 705}, "eagle", "has intermediate_size 704, but the one to be trained 705"),
        ({"layers": "2,8"}, "eagle", r"has layers \(2, 8, 14, 16\), but the one to be trained \(2, 8\)"),
        ({}, "medusa", "a head of the kind"),
    ],
)
def test_a_head_that_is_no_such_start_is_refused(
    shape: dict[str, Any], folder: str, said: str, start: PreparedRun
) -> None:
    options = BlockTraining(
        shape=BlockShape(context_tokens=True, **shape), start=str(ASSETS / "heads" / folder / "bundled")
    )
    with pytest.raises(ConfigError, match=said):
        BlockKind(options).config(BUNDLED_TARGET, start.inference_target, 48)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_layers": 2}, "this has 2 layers"),
        ({"sample_from_anchor": True}, "a slot for the last token"),
        ({"mask_token": 3}, "a token for the mask"),
    ],
)
def test_what_a_head_that_reads_tokens_has_not_is_refused(
    changed: dict[str, Any], said: str, start: PreparedRun
) -> None:
    with pytest.raises(ConfigError, match=said):
        BlockKind(BlockTraining(shape=BlockShape(context_tokens=True, **changed))).config(
            "bundled", start.inference_target, 48
        )


OTHERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"sample_from_anchor": True, "own_output_rows": True}, {"loss": "jensen-shannon"}),
    ({"layers": "2,8", "mask_token": 3, "plain_states": True, "sliding_window": 0}, {"position_weights": "d-pace"}),
    ({"markov_rank": 0, "num_layers": 2}, {"loss": "log-overlap"}),
    ({"context_tokens": True}, {"position_weights": "on-policy"}),
]
"""The second reads no state after the target's final norm, whose distribution is learnt all the same."""


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_other_shapes_weights_and_losses_train(start: PreparedRun, tmp_path: Path, number: int) -> None:
    shape, more = OTHERS[number]
    options = replace(TINY, shape=replace(TINY.shape, **shape), **more)
    made = prepare_head(BUNDLED_TARGET, start.rows.folder, tmp_path, BlockKind(options), QUIET)
    state = train(made.head, made.target, made.rows, tmp_path, made.kind, QUIET, None)
    assert state.losses[-1] < state.losses[0]


@pytest.mark.slow
def test_sigkill_at_any_moment_and_the_same_command_with_resume(tmp_path: Path) -> None:
    data = write_answers(tmp_path / "answers.jsonl")
    keys = """
[train.block]
target = "bundled"
draft_vocab = 200
intermediate_size = 32
max_steps = 40
tokens_per_step = 128
window = 64
num_layers = 1
block_size = 3
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
            sys.executable, "-m", "forerun", "--config", str(file), "train", "block", str(tmp_path / name),
            "--data", str(data), *more,
        ]  # fmt: skip

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command("whole"), check=True, timeout=300, env=environment)
    rng, more = random.Random(1), ("--force",)
    for _ in range(3):
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
