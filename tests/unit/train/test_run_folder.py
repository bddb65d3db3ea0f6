"""What a run keeps on disk: damage is refused with file and remedy, nothing is overwritten, an interrupt saves."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from rich.console import Console

from forerun.config import SHIPPED_HEADS
from forerun.errors import ConfigError
from forerun.models import LanguageModel
from forerun.train.card import load_saved_tokenizer, read_record, save_model
from forerun.train.checkpoint import CHECKPOINT, LoopState, load_checkpoint, pin, run_in, save_checkpoint
from forerun.train.corpus import SourceFile
from forerun.train.data.packed import PackedDocument, pack
from forerun.train.draft.samples import Labels, Shard, ShardBatches
from forerun.train.evaluate import TopProbs
from forerun.train.heads.options import BlockTraining, EagleTraining, HeadTraining, MedusaTraining
from forerun.train.heads.run import FREE, pinned_options
from forerun.train.loop import Loop
from forerun.train.optim import Optimisers
from tools import lm
from tools.lm import train_tokenizer

from .conftest import SHORT_RUN, TINY

QUIET = Console(quiet=True)


def part_of_a_run() -> tuple[torch.nn.Module, Optimisers]:
    model = lm.build_model(replace(TINY, num_layers=1), 0, 0)
    return model, Optimisers(model, SHORT_RUN.optimisation)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, *part_of_a_run(), LoopState(3, 384, 1.5, [2.0, 1.0]))
    return tmp_path / CHECKPOINT


def test_a_checkpoint_goes_round(checkpoint: Path) -> None:
    model, optimisers = part_of_a_run()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert load_checkpoint(checkpoint.parent, model, optimisers) == LoopState(3, 384, 1.5, [2.0, 1.0])
    assert torch.equal(model.lm_head.weight, part_of_a_run()[0].lm_head.weight)
    assert list(checkpoint.parent.iterdir()) == [checkpoint]


def test_a_damaged_checkpoint_is_refused(checkpoint: Path) -> None:
    whole, draw = checkpoint.read_bytes(), random.Random(0)
    damaged = [b"", whole[:10], whole[: len(whole) // 2], whole[:-1], whole + b"x"]
    for _ in range(20):
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        damaged.append(bytes(flipped))
    model, optimisers = part_of_a_run()
    for content in damaged:
        checkpoint.write_bytes(content)
        with pytest.raises(ConfigError, match=r"checkpoint\.pt is damaged.*Remove it, and --resume begins this stage"):
            load_checkpoint(checkpoint.parent, model, optimisers)


def test_a_checkpoint_of_another_model_is_refused(checkpoint: Path) -> None:
    other = lm.build_model(TINY, 0, 0)
    with pytest.raises(ConfigError, match=r"checkpoint\.pt is no checkpoint of this model"):
        load_checkpoint(checkpoint.parent, other, Optimisers(other, SHORT_RUN.optimisation))


def test_a_full_disk_leaves_the_former_checkpoint(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = checkpoint.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"checkpoint\.pt cannot be written: No space left on device\. Give"):
        save_checkpoint(checkpoint.parent, *part_of_a_run(), LoopState())
    assert checkpoint.read_bytes() == before and list(checkpoint.parent.iterdir()) == [checkpoint]


@pytest.mark.parametrize("content", [b"", b'{"seed": 1', b"[1]", b"\xff", b"[" * 10_000])
def test_damaged_options_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "options.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"options\.json: it .*another OUT"):
        pin(tmp_path, {"seed": 1})


@pytest.mark.parametrize(
    ("head", "options"), [("eagle", EagleTraining()), ("block", BlockTraining()), ("medusa", MedusaTraining())]
)
def test_runs_that_were_begun_with_more_options_go_on(head: str, options: HeadTraining) -> None:
    """The records of the heads that are shipped hold all that there were."""
    made = json.loads((SHIPPED_HEADS / head / "bundled" / "training.json").read_text())["options"]
    found = pinned_options(options)
    assert made.keys() <= found.keys() | set(FREE) and made["shape"].keys() == found["shape"].keys()
    assert all(made[name] == found[name] for name in ("warmup_steps", "weight_decay", "dropout", "noise"))


def test_a_damaged_record_or_tokenizer_is_named(files: list[SourceFile], tmp_path: Path) -> None:
    (tmp_path / "training.json").write_text("{")
    with pytest.raises(Exception, match=r"training\.json: it is not JSON"):
        read_record(tmp_path)
    train_tokenizer((file.text for file in files), 300).save_pretrained(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text[: len(text) // 2])
    with pytest.raises(Exception, match="no tokenizer can be made of it"):
        load_saved_tokenizer(tmp_path)


def test_a_run_is_not_resumed_with_another_tokenizer(files: list[SourceFile], tmp_path: Path) -> None:
    options = replace(SHORT_RUN, tokens=128)
    lm.train(files, tmp_path, options, QUIET)
    train_tokenizer(["other text"], 320).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="tokenizer was"):
        lm.train(files, tmp_path, options, QUIET)


def test_nothing_is_overwritten_without_being_asked(tmp_path: Path) -> None:
    work, out = tmp_path / "out.run", tmp_path / "out"

    def run(**flags: bool) -> None:
        with run_in(work, out, QUIET, **{"resume": False, "force": False, **flags}):
            pin(work, {"seed": 1})

    with pytest.raises(ConfigError, match="holds no run to resume"):
        run(resume=True)
    run()
    with pytest.raises(ConfigError, match=r"holds another run\. Add --resume .* --force"):
        run()
    run(resume=True)
    (work / CHECKPOINT).touch()
    (work / "notes.txt").touch()
    run(force=True)
    assert sorted(path.name for path in work.iterdir()) == ["notes.txt", "options.json"]
    (work / "options.json").unlink()
    (work / "tokenizer.json").touch()  # of a run that was stopped before its first step, or somebody else's
    with pytest.raises(ConfigError, match="holds another run"):
        run()
    assert (work / "tokenizer.json").exists()
    (work / "tokenizer.json").unlink()
    out.mkdir()
    (out / "config.json").touch()
    with pytest.raises(ConfigError, match=r"out exists\..*--force.*--resume"):
        run()
    run(force=True)


def test_a_failure_of_the_system_is_said_with_its_remedy(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"w cannot go on: .*No space left on device.*go on by --resume"),
        run_in(tmp_path / "w", tmp_path / "o", QUIET, resume=False, force=False),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    with (
        run_in(tmp_path / "w", tmp_path / "o", QUIET, resume=False, force=False),
        pytest.raises(ConfigError, match="in use by another process"),
        run_in(tmp_path / "w", tmp_path / "p", QUIET, resume=False, force=True),
    ):
        pass


def test_a_model_is_written_whole_or_not_at_all(
    files: list[SourceFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").touch()
    (out / "config.json").write_text("former")
    tokenizer = train_tokenizer((file.text for file in files), 320)
    model, _ = part_of_a_run()

    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(type(tokenizer), "save_pretrained", lambda *_: full(None))
        with pytest.raises(ConfigError, match="out cannot be written: No space left on device"):
            save_model(model, tokenizer, out)
    assert (out / "config.json").read_text() == "former" and list(tmp_path.glob(".out*")) == []
    save_model(model, tokenizer, out)
    assert (out / "notes.txt").exists() and (out / "model.safetensors").exists() and list(tmp_path.glob(".out*")) == []


@pytest.mark.usefixtures("sigint_handled")
def test_ctrl_c_finishes_the_step_and_saves(
    files: list[SourceFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _, _ = lm.train(files, tmp_path / "whole", SHORT_RUN, QUIET)
    original, steps = Loop._step, []

    def step(self: Loop, batch, progress: float) -> float:
        steps.append(progress)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, batch, progress)

    def run(resume: bool) -> torch.nn.Module:
        with run_in(tmp_path / "work", tmp_path / "out", console, resume=resume, force=False):
            return lm.train(files, tmp_path / "work", SHORT_RUN, QUIET)[0]

    console = Console(record=True, quiet=False, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(Loop, "_step", step)
    with pytest.raises(KeyboardInterrupt):
        run(resume=False)
    assert len(steps) == 3 and signal.getsignal(signal.SIGINT) is before
    assert "the same command with --resume goes on" in console.export_text()
    resumed = run(resume=True)
    assert len(steps) == 8
    assert all(torch.equal(tensor, resumed.state_dict()[name]) for name, tensor in whole.state_dict().items())


def small_shard() -> Shard:
    tokens = np.arange(8, dtype=np.uint16).reshape(2, 4)
    probs = TopProbs(np.ones((2, 3, 2), np.uint16), np.ones((2, 3, 2), np.float16))
    return Shard(tokens, probs, np.zeros((2, 4), np.int32), np.ones((2, 4), np.bool_))


def small_labels(folder: Path) -> Labels:
    documents = [PackedDocument([1, 2, 3], [True] * 3)]
    rows = pack(documents, folder / "rows", window=8, vocab_size=9, made_from={})
    target = cast(LanguageModel, SimpleNamespace(device=torch.device("cpu"), vocab_size=9))
    return Labels(target, rows, folder / "labels", 2)


def test_an_interrupt_while_labels_are_made_leaves_whole_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def done(_shards: int, _tokens: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Labels, "of", lambda *_: small_shard())
    with pytest.raises(KeyboardInterrupt):
        small_labels(tmp_path).write(done, 1)
    assert len(list((tmp_path / "labels").glob("*.npy"))) == 5  # of the one that is whole


@pytest.mark.parametrize("part", ["tokens", "ids", "probabilities", "documents", "wanted"])
def test_a_damaged_shard_is_refused(tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Labels, "of", lambda *_: small_shard())
    labels = small_labels(tmp_path)
    assert labels.write(lambda *_: None, 1) == 1
    first = ShardBatches(labels, 1, 16, 0).batch(0)[0].tolist()
    assert sorted(first) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    path = tmp_path / "labels" / f"shard-0000.{part}.npy"
    whole = path.read_bytes()
    for content in (b"", whole[:-1], whole[:100], whole[:-50] + bytes([whole[-50] ^ 1]) + whole[-49:]):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"shard-0000\.{part}\.npy is damaged.*--resume"):
            ShardBatches(labels, 1, 6, 0)


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    work = tmp_path / "out.run"
    pin(work, {"seed": 1})
    left = [work / "distil" / ".checkpoint.pt.0a1b.tmp", work / "samples" / ".shard-0003.ids.npy.ff.tmp"]
    for path in left:
        path.parent.mkdir()
        path.write_bytes(b"half")
    with run_in(work, tmp_path / "out", QUIET, resume=True, force=False):
        assert not any(path.exists() for path in left)
