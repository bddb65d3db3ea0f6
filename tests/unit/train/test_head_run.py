"""Whole runs of `forerun train eagle`, `block` and `medusa` on the bundled target, as small as they can be."""

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
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from forerun import LLM, MedusaTree, SamplingParams
from forerun.config import BUNDLED_TARGET
from forerun.drafters.block import Block
from forerun.drafters.models.head_files.folder import load_head
from forerun.drafters.models.medusa.config import RANKS
from forerun.errors import ConfigError
from forerun.export.gguf import export_llama_cpp
from forerun.train.block import BlockKind
from forerun.train.checkpoint import CHECKPOINT, FILE_NAME, TARGET, LoopState, save_checkpoint
from forerun.train.data.packed import PackedDocument, frequent_tokens, pack, token_counts
from forerun.train.eagle import EagleKind
from forerun.train.heads.commands import PreparedRun, evaluate_head, measure_head, prepare_head, train_head
from forerun.train.heads.evaluate import HeldOut
from forerun.train.heads.options import (
    BlockShape,
    BlockTraining,
    EagleShape,
    EagleTraining,
    MedusaShape,
    MedusaTraining,
)
from forerun.train.heads.run import run_training
from forerun.train.heads.start import HeadKind
from forerun.train.loop import Loop
from forerun.train.medusa import MedusaKind
from forerun.utils.files import locked, sealed_file

pytestmark = pytest.mark.usefixtures("few_timed_steps")
QUIET = Console(quiet=True)
SHORT: dict[str, Any] = {
    "max_steps": 4,
    "tokens_per_step": 96,
    "window": 48,
    "evaluate_every": 2,
    "held_out_rows": 1,
    "num_draft_tokens": 2,
    "checkpoint_seconds": 1e9,
    "threads": 1,
    "dtype": "float32",
}


@dataclass(frozen=True)
class Trained:
    """A kind of head.

    Attributes:
        kind, options: of a short run.
        poisoned: a tensor of a checkpoint.
        said: what the card says.
        stored: what the configuration of a head says, by its attributes.
        shape: arguments of a run that is killed, as text.
    """

    kind: Callable[[Any], HeadKind[Any]]
    options: Any
    poisoned: str
    said: tuple[str, ...]
    stored: dict[str, Any]
    shape: str

    def changed(self, shape: dict[str, Any], **options: Any) -> Any:
        """Return the options with other ones of the shape and of the run."""
        return replace(self.options, shape=replace(self.options.shape, **shape), **options)


TRAINED = {
    "eagle": Trained(
        EagleKind,
        EagleTraining(shape=EagleShape(draft_vocab=200, intermediate_size=32, layers="2,8,16"), **SHORT),
        "midlayer.hidden_norm.weight",
        ("EAGLE-3 head",),
        {"layers": (2, 8, 16)},
        "intermediate_size=32",
    ),
    "block": Trained(
        BlockKind,
        BlockTraining(
            shape=BlockShape(
                block_size=3,
                num_layers=1,
                draft_vocab=200,
                intermediate_size=32,
                layers="2,8,16",
                markov_rank=4,
                confidence=True,
            ),
            anchors=9,
            **SHORT,
        ),
        "norm.weight",
        ("block-3 head",),
        {"layers": (2, 8, 16), "kind": "block-3", "context_tokens": False},
        "intermediate_size=32, num_layers=1, block_size=3",
    ),
    "medusa": Trained(
        MedusaKind,
        MedusaTraining(shape=MedusaShape(num_heads=2, draft_vocab=200, sequential=True), **SHORT),
        "blocks.1.layers.0.bias",
        ("Hydra head", "Overlap at temperature 1"),
        {"num_heads": 2},
        "num_heads=2",
    ),
}


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


class Starts(dict[str, PreparedRun]):
    """Prepared runs by the name of their kind, each made when it is first wanted."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root
        self.answers = write_answers(root / "answers.jsonl")

    def __missing__(self, name: str) -> PreparedRun:
        own = TRAINED[name]
        (self._root / name).mkdir()
        self[name] = prepare_head(BUNDLED_TARGET, self.answers, self._root / name, own.kind(own.options), QUIET)
        return self[name]


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    return Starts(tmp_path_factory.mktemp("heads"))


@pytest.fixture
def start(starts: Starts) -> PreparedRun:
    return starts["eagle"]


def fresh(start: PreparedRun) -> Any:
    head = start.kind.module(start.head.config)
    start.kind.set_first_weights(head, torch.ones(1, 256), start.target.output_rows)
    return head


def run(start: PreparedRun, folder: Path, **changed: Any) -> tuple[dict[str, Tensor], LoopState]:
    """Return the weights at the end of a run with other options, and its state."""
    head, options = fresh(start), replace(start.kind.options, **changed)
    rows = start.rows.held_out()
    during = HeldOut(start.target, rows, options.held_out_rows, start.vocabulary, 2, start.kind.predict)

    def score(head: Any) -> float:
        return during.score(head).expected_length

    state = run_training(head, start.target, start.rows, folder, type(start.kind)(options), QUIET, score)
    return head.state_dict(), state


@pytest.mark.parametrize("name", TRAINED)
def test_a_killed_and_resumed_run_ends_with_the_same_weights(
    name: str, starts: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = starts[name]
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
    for key, tensor in whole.items():
        assert torch.equal(tensor, resumed[key]), key


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [("eagle", "learning_rate", 1.0), ("block", "anchors", 5), ("medusa", "step_weight", 1.0)],
)
def test_a_run_goes_on_with_its_own_options(name: str, option: str, value: Any, starts: Starts, tmp_path: Path) -> None:
    run(starts[name], tmp_path, max_steps=1, evaluate_every=0)
    with pytest.raises(ConfigError, match=option):
        run(starts[name], tmp_path, max_steps=1, evaluate_every=0, **{option: value})
    path = tmp_path / FILE_NAME
    written = json.loads(path.read_text())
    sizes, signs = written[TARGET].rsplit("-", 1)
    path.write_text(json.dumps(written | {TARGET: f"{sizes}-{'0' * len(signs)}"}))
    with pytest.raises(ConfigError, match="is the run of a head for another target's weights"):
        run(starts[name], tmp_path, max_steps=1, evaluate_every=0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", TRAINED)
def test_a_loss_that_is_no_number_ends_the_run_and_leaves_the_checkpoint(
    name: str, starts: Starts, tmp_path: Path
) -> None:
    start = starts[name]
    run(start, tmp_path, max_steps=2, minutes=1e-9)
    before = (tmp_path / CHECKPOINT).read_bytes()
    (tmp_path / "options.json").unlink()
    state = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    state["model"][TRAINED[name].poisoned][0] = float("nan")
    torch.save(state, tmp_path / "plain.pt")
    with sealed_file(tmp_path / CHECKPOINT, ConfigError) as file:
        file.write((tmp_path / "plain.pt").read_bytes())
    poisoned = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(ConfigError, match="no number"):
        run(start, tmp_path, max_steps=2)
    assert (tmp_path / CHECKPOINT).read_bytes() == poisoned != before


def test_a_run_that_is_out_of_time_ends_with_its_schedule_and_an_evaluation(start: PreparedRun, tmp_path: Path) -> None:
    head, console = fresh(start), Console(file=io.StringIO())
    scores = []

    def score(head: Any) -> float:
        scores.append(1.0)
        return 1.0

    options = replace(TRAINED["eagle"].options, evaluate_every=3)
    kind = EagleKind(options)
    hurried = EagleKind(replace(options, minutes=1e-9))
    state = run_training(head, start.target, start.rows, tmp_path, hurried, console, score)
    assert state.step == 1 and state.scores == [(1, 1.0)] and (tmp_path / CHECKPOINT).exists()
    assert "ended by --minutes after step 1 of 4; --resume goes on" in console.file.getvalue()  # type: ignore[attr-defined]
    assert run_training(head, start.target, start.rows, tmp_path, kind, QUIET, score).step == 4


def test_a_run_ends_by_its_evaluations_with_the_best_weights(start: PreparedRun, tmp_path: Path) -> None:
    scores = iter([1.2, 1.5, 1.4, 1.5, 1.3, 1.6])
    kept: list[dict[str, Tensor]] = []

    def falling(head: Any) -> float:
        kept.append({name: tensor.clone() for name, tensor in head.state_dict().items()})
        return next(scores)

    head = fresh(start)
    kind = EagleKind(replace(TRAINED["eagle"].options, evaluate_every=1, patience=1))
    state = run_training(head, start.target, start.rows, tmp_path, kind, QUIET, falling)
    assert [score for _, score in state.scores] == [1.2, 1.5, 1.4] and state.best_step == 2
    assert all(torch.equal(tensor, kept[1][name]) for name, tensor in head.state_dict().items())


def test_states_on_disk_are_bounded_and_change_no_weight(start: PreparedRun, tmp_path: Path) -> None:
    computed, _ = run(start, tmp_path / "computed", max_steps=1, evaluate_every=0)
    for name, gigabytes in (("all", 1.0), ("few", 8e-5)):
        for _ in range(2):  # the second time they are read
            found, _ = run(start, tmp_path / name, max_steps=1, evaluate_every=0, cached_states=gigabytes)
            (tmp_path / name / CHECKPOINT).unlink()
            assert all(torch.equal(tensor, found[key]) for key, tensor in computed.items())
        files = list((tmp_path / name / "states").glob("row-*"))
        assert 0 < sum(path.stat().st_size for path in files) <= gigabytes * 1e9
    assert len(files) == 1


def trained_folder(start: PreparedRun, folder: Path, options: Any, **more: Any) -> Path:
    """Train by the command's function; its run lies beside the folder."""
    more = {"resume": False, "force": False} | more
    work, kind = folder.with_suffix(".run"), type(start.kind)(options)
    train_head(folder, work, BUNDLED_TARGET, start.rows.folder, kind, "forerun train", **more)
    return folder


def assert_drafts(start: PreparedRun, folder: Path) -> None:
    llm = LLM(start.inference_target, start.kind.drafter(folder), num_draft_tokens=2)
    result: Any = llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert result.stats.num_draft_tokens > 0


@pytest.mark.parametrize("name", TRAINED)
def test_the_command_writes_a_head_that_drafts_and_is_evaluated_with_its_card(
    name: str, starts: Starts, tmp_path: Path
) -> None:
    own, start = TRAINED[name], starts[name]
    options = replace(own.options, max_steps=1, evaluate_every=0, dtype="bfloat16")
    out = trained_folder(start, tmp_path / "head", options)
    stored = load_head(out)
    assert {key: getattr(stored.config, key) for key in own.stored} == own.stored
    card, record = (out / "README.md").read_text(), json.loads((out / "training.json").read_text())
    assert all(text in card for text in (*own.said, "Predicted speed-up"))
    assert record["training"]["steps"] == 1 and record["held_out"]["documents"] > 0
    assert record["options"]["dtype"] == "bfloat16"
    state = run_training(copy.deepcopy(start.head), start.target, start.rows, tmp_path, own.kind(options), QUIET, None)
    assert state.losses[0] == pytest.approx(record["training"]["final_loss"], rel=0.01)
    assert_drafts(start, out)
    report = evaluate_head(BUNDLED_TARGET, out, start.rows.folder, num_draft_tokens=2, new_tokens=8)
    assert len(report.speedups) == 2 and report.score.documents > 0
    with pytest.raises(ConfigError, match="holds another run"):
        trained_folder(start, out, options)
    with (
        locked(out.with_suffix(".run"), ConfigError, wait=False),
        pytest.raises(ConfigError, match="in use by another"),
    ):
        trained_folder(start, out, options, resume=True)


def test_a_quantized_gguf_file_is_a_target(starts: Starts, tmp_path: Path) -> None:
    """For a block head of two layers with bias and confidence."""
    target = tmp_path / "target.gguf"
    export_llama_cpp(BUNDLED_TARGET, target, type_name="Q8_0", pre="gpt-2")
    own = TRAINED["block"]
    out = tmp_path / "head"
    options = own.changed({"num_layers": 2}, max_steps=1, evaluate_every=0)
    how = {"resume": False, "force": False}
    train_head(out, tmp_path / "run", str(target), starts.answers, own.kind(options), "forerun train", **how)
    assert json.loads((out / "training.json").read_text())["target"]["number_format"] == "Q8_0"
    llm = LLM(target, Block(out), num_draft_tokens=2)
    result: Any = llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert result.stats.num_draft_tokens > 0


def test_a_draft_vocabulary_is_of_the_tokens_that_are_learnt(tmp_path: Path) -> None:
    document = PackedDocument([7, 7, 7, 5, 6], [False, False, False, True, True])
    rows = pack([document], tmp_path / "packed", window=8, vocab_size=9, made_from={})
    counts = token_counts(rows, 9)
    assert counts[0].nonzero().flatten().tolist() == [5, 6]
    assert frequent_tokens(counts, 3, [8]).tolist() == [5, 6, 8]
    assert frequent_tokens(counts, 3, []).tolist() == [5, 6, 7]  # then what prompts hold


def test_a_tree_of_medusa_heads_grows_by_what_is_counted_after_training(starts: Starts, tmp_path: Path) -> None:
    start = starts["medusa"]
    options = TRAINED["medusa"].changed({"sequential": False}, max_steps=2, evaluate_every=0, held_out_rows=2)
    out = trained_folder(start, tmp_path / "heads", options)
    assert "Medusa head" in (out / "README.md").read_text()
    accuracies = load_head(out).config.accuracies  # type: ignore[attr-defined]
    assert len(accuracies) == 2 * RANKS and max(accuracies) > 0
    llm = LLM(start.inference_target, MedusaTree(out), num_draft_tokens=4)
    result: Any = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert result[0].stats.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: MedusaKind(MedusaTraining(num_draft_tokens=6)),
            "num_draft_tokens is 6, but such a head drafts 5 tokens",
        ),
        (
            lambda: MedusaTraining(position_weights="d-pace", shape=MedusaShape(output_rows="each")),
            "needs one output layer",
        ),
        (lambda: MedusaShape(output_rows="mine"), "output_rows is 'mine'"),
        (
            lambda: BlockKind(BlockTraining(shape=BlockShape(block_size=3), num_draft_tokens=5)),
            "num_draft_tokens is 5, but such a head drafts 3 tokens",
        ),
        (
            lambda: BlockKind(BlockTraining(start="head")),
            "only a head with context_tokens has the layer of an EAGLE head",
        ),
        (
            lambda: BlockTraining(position_weights="steep"),
            "position_weights is 'steep', but must be one of decay, d-pace",
        ),
        (lambda: BlockShape(layers="a"), "layers is 'a'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


OTHERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("eagle", {"version": 1, "layers": ""}, {"feature_weight": 1.0, "loss": "hybrid"}),
    ("eagle", {"own_output_rows": True}, {"loss": "total-variation"}),
    ("block", {"sample_from_anchor": True, "own_output_rows": True}, {"loss": "jensen-shannon"}),
    (
        "block",  # it reads no state after the target's final norm, whose distribution is learnt all the same
        {"layers": "2,8", "mask_token": 3, "plain_states": True, "sliding_window": 0},
        {"position_weights": "d-pace"},
    ),
    ("block", {"markov_rank": 0, "num_layers": 2, "confidence": False}, {"loss": "log-overlap"}),
    ("block", {"context_tokens": True}, {"position_weights": "on-policy"}),
    ("medusa", {"sequential": False, "output_rows": "each", "num_layers": 2}, {"loss": "hybrid"}),
    ("medusa", {"sequential": False, "output_rows": "one"}, {"position_weights": "d-pace"}),
]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_other_shapes_weights_and_losses_train(starts: Starts, tmp_path: Path, number: int) -> None:
    name, shape, more = OTHERS[number]
    own, start = TRAINED[name], starts[name]
    options = own.changed(shape, evaluate_every=0, held_out_rows=2, **more)
    made = prepare_head(BUNDLED_TARGET, start.rows.folder, tmp_path, own.kind(options), QUIET)
    state = run_training(made.head, made.target, made.rows, tmp_path, made.kind, QUIET, None)
    assert state.losses[-1] < state.losses[0]
    held_out = HeldOut(made.target, made.rows.held_out(), 2, made.vocabulary, 2, made.kind.predict)
    assert len(measure_head(made, held_out, 2).speedups) == 2
    out = trained_folder(start, tmp_path / "head", replace(options, max_steps=1))
    assert_drafts(start, out)
    report = evaluate_head(BUNDLED_TARGET, out, start.rows.folder, num_draft_tokens=2, new_tokens=8, threads=1)
    assert report.score.documents > 0


@pytest.mark.slow
def test_heads_draft_no_more_tokens_than_there_are_heads(starts: Starts, tmp_path: Path) -> None:
    start = starts["medusa"]
    out = trained_folder(start, tmp_path / "heads", TRAINED["medusa"].changed({"output_rows": "one"}, max_steps=1))
    assert load_head(out).summary()["head"].count("output rows of their own") == 1
    with pytest.raises(ConfigError, match="2 heads draft no 3 tokens"):
        evaluate_head(BUNDLED_TARGET, out, start.rows.folder, num_draft_tokens=3, new_tokens=8, threads=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_sigkill_at_any_moment_and_the_same_command_with_resume(name: str, tmp_path: Path) -> None:
    data = write_answers(tmp_path / "answers.jsonl")
    kind = name.capitalize()
    program = f"""
import sys
from pathlib import Path

from forerun.train.{name} import {kind}Kind
from forerun.train.heads.commands import train_head
from forerun.train.heads.options import {kind}Shape, {kind}Training

out, data, *flags = sys.argv[1:]
options = {kind}Training(
    shape={kind}Shape(draft_vocab=200, {TRAINED[name].shape}),
    max_steps=40,
    tokens_per_step=128,
    window=64,
    evaluate_every=10,
    held_out_rows=2,
    num_draft_tokens=2,
    checkpoint_seconds=0.1,
    threads=2,
)
how = {{"resume": "--resume" in flags, "force": "--force" in flags}}
train_head(Path(out), Path(out + ".run"), "bundled", Path(data), {kind}Kind(options), "", **how)
"""

    def command(out: str, *more: str) -> list[str]:
        return [sys.executable, "-c", program, str(tmp_path / out), str(data), *more]

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
    whole, killed = (load_head(tmp_path / each).tensors for each in ("whole", "killed"))
    assert all(torch.equal(whole[key], killed[key]) for key in whole)
