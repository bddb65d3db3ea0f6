"""`forerun train`: what its flags make of the options. Nothing is trained here."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.cli.train_heads import this_command
from forerun.config import ASSETS
from forerun.train import commands
from forerun.train.commands import Evaluation
from forerun.train.defaults import (
    DRAFT_ARCHITECTURE,
    DRAFT_TEXT,
    OTHER_VOCAB_ARCHITECTURE,
    OTHER_VOCAB_SAMPLING,
    OTHER_VOCAB_TEXT,
    Architecture,
    DraftTraining,
    LmTraining,
    Optimisation,
    OtherVocabTraining,
    Pruning,
)
from forerun.train.evaluate import TextScore
from forerun.train.heads import commands as head_commands

from .conftest import Invoke

SIZES = {"hidden_size": 64, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "intermediate_size": 96}
SIZE_FLAGS = [word for name, size in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(size))]
TEXT_FLAGS = "--tokens 1000 --tokens-per-step 10 --copy-share 0.3 --rename-share 0.4 --seed 5 --threads 2 --device cpu"
TEXT = {"tokens_per_step": 10, "copy_share": 0.3, "rename_share": 0.4, "seed": 5}


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command called with: its positional arguments as "args", the others by name."""
    seen: dict[str, Any] = {}

    def note(*args: Any, **others: Any) -> Evaluation:
        seen.update(others, args=args)
        return Evaluation(TextScore(1.0, 2.0, 3, 4), TextScore(1.0, 2.0, 3, 4), [])

    for name in ("train_lm", "train_draft", "train_other_vocab", "evaluate_pair"):
        monkeypatch.setattr(commands, name, note)
    return seen


def test_the_defaults_are_those_of_the_options(invoke: Invoke, called: dict[str, Any]) -> None:
    work = Path("out.run")
    for command, expected in (("lm", LmTraining()), ("draft", DraftTraining()), ("other-vocab", OtherVocabTraining())):
        assert invoke("train", command, "out").exit_code == 0
        assert (called["args"][0], called["args"][1], called["args"][-1]) == (Path("out"), work, expected)
    assert called["args"][2] == ASSETS / "target"


def test_a_target_is_a_folder_or_bundled(invoke: Invoke, called: dict[str, Any]) -> None:
    for name, folder in (("bundled", ASSETS / "target"), ("some/folder", Path("some/folder"))):
        assert invoke("train", "draft", "out", "--target", name).exit_code == 0
        assert called["args"][2] == folder


def test_a_language_model_is_told_what_was_asked(invoke: Invoke, called: dict[str, Any]) -> None:
    own = "--short-window 16 --long-share 0.2 --weight-decay 0.5 --checkpoint-seconds 7 --resume"
    flags = [*TEXT_FLAGS.split(), *own.split()]
    result = invoke("train", "lm", "out", *flags, *SIZE_FLAGS, "--data", "d", "--work", "w", "--tokenizer", "t")
    assert result.exit_code == 0, result.output
    assert called["args"][:3] == (Path("out"), Path("w"), Path("d"))
    assert called["args"][3] == LmTraining(
        architecture=Architecture(**SIZES),
        optimisation=Optimisation(weight_decay=0.5),
        tokens=1000,
        short_window=16,
        long_share=0.2,
        checkpoint_seconds=7,
        threads=2,
        device="cpu",
        **TEXT,  # type: ignore[arg-type]
    )
    assert called["resume"] is True and called["force"] is False and called["tokenizer_folder"] == Path("t")


@pytest.mark.parametrize("command", ["lm", "draft", "other-vocab"])
def test_every_command_may_be_forced_and_told_when_to_save(
    invoke: Invoke, called: dict[str, Any], command: str
) -> None:
    assert invoke("train", command, "out", "--force", "--checkpoint-seconds", "9").exit_code == 0
    options = called["args"][-1]
    assert called["force"] is True and called["resume"] is False
    assert (options.text if command == "other-vocab" else options).checkpoint_seconds == 9


def test_a_draft_is_told_what_was_asked(invoke: Invoke, called: dict[str, Any]) -> None:
    own = "--text-tokens 20 --sample-tokens 30 --text-law-tokens 40 --sample-batch 50 --new-tokens 60"
    flags = [*TEXT_FLAGS.split(), *own.split(), "--own-prompt-share", "0.5", *SIZE_FLAGS]
    assert invoke("train", "draft", "out", "--target", "t", "--start", "s", *flags).exit_code == 0
    text = replace(DRAFT_TEXT, tokens=20, architecture=replace(DRAFT_ARCHITECTURE, **SIZES), **TEXT)
    assert called["args"][4] == DraftTraining(
        text=text,
        sample_tokens=30,
        text_law_tokens=40,
        sample_batch=50,
        new_tokens=60,
        own_prompt_share=0.5,
        tokens=1000,
        tokens_per_step=10,
        seed=5,
        threads=2,
        device="cpu",
    )
    assert called["args"][2] == Path("t") and called["start"] == Path("s")


def test_a_draft_may_start_from_a_pruned_copy(invoke: Invoke, called: dict[str, Any]) -> None:
    flags = "--prune-layers 0,1,28,29 --prune-width 768 --prune-by weight --output-tokens 8000 --loss hybrid"
    assert invoke("train", "draft", "out", "--target", "smollm2", *flags.split()).exit_code == 0
    pruning = Pruning(layers="0,1,28,29", width=768, by="weight")
    assert called["args"][4] == DraftTraining(pruning=pruning, output_tokens=8000, loss="hybrid")
    assert called["args"][2] == Path("smollm2")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--loss luck", "--loss is 'luck', but must be one of kl-then-tv"),
        ("--prune-width 9", "--prune-width has no effect without --prune-layers"),
        ("--prune-layers 0 --prune-by luck", "--prune-by is 'luck'"),
        ("--output-tokens 0", "of 1 or more"),
    ],
)
def test_options_of_a_draft_that_make_no_sense_are_refused(
    invoke: Invoke, called: dict[str, Any], flags: str, message: str
) -> None:
    result = invoke("train", "draft", "out", *flags.split())
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert not called


def test_a_draft_with_its_own_vocabulary_is_told_what_was_asked(invoke: Invoke, called: dict[str, Any]) -> None:
    own = "--read-tokens 20 --sample-tokens 30 --sample-batch 50 --own-prompt-share 0.5 --vocab-size 300"
    assert invoke("train", "other-vocab", "out", *TEXT_FLAGS.split(), *own.split(), *SIZE_FLAGS).exit_code == 0
    machine: dict[str, Any] = {"threads": 2, "device": "cpu"}
    sizes = replace(OTHER_VOCAB_ARCHITECTURE, vocab_size=300, **SIZES)
    drawn = replace(OTHER_VOCAB_SAMPLING, sample_tokens=30, sample_batch=50, own_prompt_share=0.5, seed=5, **machine)
    assert called["args"][4] == OtherVocabTraining(
        text=replace(OTHER_VOCAB_TEXT, architecture=sizes, tokens=1000, **TEXT, **machine),
        read_tokens=20,
        sampling=drawn,
    )
    assert drawn.text_law_tokens == 0


def test_samples_that_are_there_are_not_drawn_by_other_rules(invoke: Invoke, called: dict[str, Any]) -> None:
    assert invoke("train", "other-vocab", "out", "--samples", "s").exit_code == 0
    assert called["samples"] == Path("s")
    result = invoke("train", "other-vocab", "out", "--samples", "s", "--sample-batch", "128")
    assert result.exit_code == 2
    assert "--sample-batch has no effect" in result.stderr


def test_a_pair_is_measured_where_it_was_asked_for(invoke: Invoke, called: dict[str, Any]) -> None:
    result = invoke("train", "eval", "--threads", "1", "--device", "cpu", "-k", "3", "--new-tokens", "8", "--json")
    assert json.loads(result.stdout)["target"] == {"bits_per_byte": 1.0, "perplexity": 2.0, "tokens": 3, "bytes": 4}
    assert (called["threads"], called["device"], called["num_draft_tokens"], called["new_tokens"]) == (1, "cpu", 3, 8)


@pytest.mark.parametrize("command", ["lm", "draft", "other-vocab", "eval"])
def test_a_device_that_is_not_there_is_refused_first(invoke: Invoke, tmp_path: Path, command: str) -> None:
    arguments = [] if command == "eval" else [str(tmp_path / "out")]
    result = invoke("train", command, *arguments, "--device", "abacus")
    assert result.exit_code == 2
    assert "device is 'abacus'" in result.stderr and "Give cpu" in result.stderr


@pytest.mark.parametrize("flags", [["--tokens", "0"], ["--copy-share", "2"], ["--short-window", "7"], ["--seed", "-1"]])
def test_numbers_out_of_range_are_refused(invoke: Invoke, called: dict[str, Any], flags: list[str]) -> None:
    result = invoke("train", "lm", "out", *flags)
    assert result.exit_code == 2
    assert flags[0] in result.stderr
    assert not called


def test_the_command_of_a_card_holds_no_places(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["forerun", "train", "eagle", "out/head", "--data=answers/a.jsonl", "--target", "models/it", "-k", "3"]
    monkeypatch.setattr(sys, "argv", given)
    assert this_command() == "forerun train eagle head --data=a.jsonl --target it -k 3"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("medusa", 5),
        ("medusa --num-heads 3", 3),
        ("medusa --num-heads 8", 5),
        ("medusa --num-heads 8 -k 7", 7),
        ("medusa --num-heads 3 -k 2", 2),
        ("block --block-size 4", 4),
        ("block --block-size 8 -k 8", 8),
        ("eagle", 5),
        ("eagle -k 9", 9),
    ],
)
def test_heads_are_evaluated_on_as_many_tokens_as_they_draft(
    flags: str, expected: int, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[Any] = []
    monkeypatch.setattr(head_commands, "train_head", lambda *args, **_: kinds.append(args[4]))
    command, *more = flags.split()
    result = invoke("train", command, "out", "--target", "bundled", "--data", "d", *more)
    assert result.exit_code == 0, result.output
    assert kinds[0].num_draft_tokens == expected


@pytest.mark.parametrize(("flags", "most"), [("medusa --num-heads 3 -k 4", 3), ("block -k 6", 5)])
def test_more_tokens_than_a_head_drafts_are_refused(flags: str, most: int, invoke: Invoke) -> None:
    command, *more = flags.split()
    result = invoke("train", command, "out", "--target", "bundled", "--data", "d", *more)
    assert result.exit_code != 0
    assert f"such a head drafts {most} tokens at most" in " ".join(result.output.split())
