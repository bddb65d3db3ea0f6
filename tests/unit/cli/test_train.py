"""`forerun train`: what its flags make of the options. Nothing is trained here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from forerun.cli.train import this_command
from forerun.config import ASSETS
from forerun.train import commands
from forerun.train.commands import Evaluation
from forerun.train.defaults import DraftTraining, Pruning
from forerun.train.evaluate import TextScore
from forerun.train.heads import commands as head_commands
from forerun.utils import fetch as store

from .conftest import Invoke


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command called with: its positional arguments as "args", the others by name."""
    seen: dict[str, Any] = {}

    def note(*args: Any, **others: Any) -> Evaluation:
        seen.update(others, args=args)
        return Evaluation(TextScore(1.0, 2.0, 3, 4), TextScore(1.0, 2.0, 3, 4), [])

    def trained(*args: Any, **others: Any) -> bool:
        seen.update(others, args=args)
        return False

    monkeypatch.setattr(commands, "train_draft", trained)
    monkeypatch.setattr(commands, "evaluate_pair", note)
    return seen


def test_the_defaults_are_those_of_the_options(invoke: Invoke, called: dict[str, Any]) -> None:
    assert invoke("train", "draft", "out", "--data", "d").exit_code == 0
    assert called["args"][:5] == (Path("out"), Path("out.run"), "bundled", Path("d"), DraftTraining())
    assert called["force"] is False and called["resume"] is False and called["start"] is None


@pytest.mark.parametrize("command", ["eagle", "block", "medusa", "mtp", "draft", "eval"])
def test_commands_have_one_default_target(
    invoke: Invoke, called: dict[str, Any], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(store, "default_model", lambda: "smollm2")
    monkeypatch.setattr(head_commands, "train_head", lambda *args, **_: called.update(args=args))
    places = ["--draft", "d"] if command == "eval" else ["out", "--data", "d"]
    result = invoke("train", command, *places)
    assert result.exit_code == 0, result.output
    assert str(called["args"][0 if command == "eval" else 2]) == "smollm2" and "so it is smollm2" in result.stderr


def test_the_bundled_pair_is_measured_where_nothing_is_named(
    invoke: Invoke, called: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "default_model", lambda: "smollm2")
    result = invoke("train", "eval")
    assert called["args"] == (ASSETS / "target", ASSETS / "draft") and "nothing to judge by" in result.stdout


@pytest.mark.parametrize("command", ["eagle", "block", "medusa", "mtp", "draft"])
def test_minutes_bound_every_training_command(
    invoke: Invoke, called: dict[str, Any], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(head_commands, "train_head", lambda *args, **_: called.update(args=args))
    assert invoke("train", command, "out", "--data", "d", "--minutes", "2.5", "--target", "bundled").exit_code == 0
    options = called["args"][4] if command == "draft" else called["args"][4].options
    assert options.minutes == 2.5


@pytest.mark.parametrize("command", ["eagle", "draft"])
def test_a_drafter_that_is_none_is_told_by_the_exit_status(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    for is_chance in (True, False):
        monkeypatch.setattr(head_commands, "train_head", lambda *_, found=is_chance, **__: found)
        monkeypatch.setattr(commands, "train_draft", lambda *_, found=is_chance, **__: found)
        assert invoke("train", command, "out", "--data", "d", "--target", "bundled").exit_code == is_chance


def test_a_version_of_eagle_that_is_none_is_not_offered(invoke: Invoke) -> None:
    result = invoke("train", "eagle", "out", "--data", "d", "--target", "bundled", "--version", "2")
    assert result.exit_code == 2 and "version is 2, but must be 1 or 3" in result.stderr
    assert "1..3" not in invoke("train", "eagle", "--help").stdout


def test_a_draft_is_told_what_was_asked(invoke: Invoke, called: dict[str, Any]) -> None:
    flags = "--tokens 1000 --window 64"
    places = ("--target", "t", "--start", "s", "--data", "d", "--force")
    assert invoke("train", "draft", "out", *places, *flags.split()).exit_code == 0
    assert called["args"][4] == DraftTraining(tokens=1000, window=64)
    assert called["args"][1:4] == (Path("out.run"), "t", Path("d")) and called["start"] == "s"
    assert called["force"] is True and called["resume"] is False


def test_a_draft_may_start_from_some_layers_of_a_model(invoke: Invoke, called: dict[str, Any]) -> None:
    flags = "--layers 0,1,28,29 --prune-width 768 --prune-by weight --output-tokens 8000 --loss hybrid"
    assert invoke("train", "draft", "out", "--data", "d", "--target", "smollm2", *flags.split()).exit_code == 0
    pruning = Pruning(layers="0,1,28,29", width=768, by="weight")
    assert called["args"][4] == DraftTraining(pruning=pruning, output_tokens=8000, loss="hybrid")
    assert called["args"][2] == "smollm2" and called["start"] is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--loss luck", "'luck' is not one of kl-then-tv"),
        ("--layers 8 --prune-by luck", "prune_by is 'luck', but must be one of activation, weight"),
        ("--learning-rate 0", "learning_rate"),
        ("--output-tokens 0", "of 1 or more"),
        ("--tokens 0", "--tokens"),
        ("--seed 1", "No such option: --seed"),
    ],
)
def test_options_of_a_draft_that_make_no_sense_are_refused(
    invoke: Invoke, called: dict[str, Any], flags: str, message: str
) -> None:
    result = invoke("train", "draft", "out", "--data", "d", *flags.split())
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert not called


def test_a_pair_is_measured_where_it_was_asked_for(invoke: Invoke, called: dict[str, Any]) -> None:
    result = invoke("train", "eval", "--device", "cpu", "-k", "3", "--json")
    assert json.loads(result.stdout)["target"] == {"bits_per_byte": 1.0, "perplexity": 2.0, "tokens": 3, "bytes": 4}
    assert (called["device"], called["num_draft_tokens"]) == ("cpu", 3)


def test_a_device_that_is_not_there_is_refused_first(invoke: Invoke) -> None:
    result = invoke("train", "eval", "--device", "abacus")
    assert result.exit_code == 2
    assert "device is 'abacus'" in result.stderr and "Give cpu" in result.stderr


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
        ("block --block-size 4", 4),
        ("eagle", 5),
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
