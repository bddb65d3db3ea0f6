"""`forerun tune`: prompts in, a configuration out, which the other commands read."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from doubles import FakeModel
from forerun import LLM
from forerun.cli import tune as command
from forerun.cli.main import app, read_config

from .conftest import Invoke


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prompts of token ids, since the model has no tokenizer."""
    model: Any = FakeModel(order=1)
    monkeypatch.setattr(command, "open_plain_target", lambda *_: LLM(model, None))
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"5 3 8 5 3 8 {n}"}) + "\n" for n in range(6)))
    return file


def tune(invoke: Invoke, prompts: Path, *more: str) -> Any:
    out = ("--out", str(prompts.parent / "forerun.toml"))
    arguments = ("--max-tokens", "16", "--minutes", "0.1", "--drafters", "suffix,prompt-lookup", *out)
    return invoke("tune", "bundled", "--prompts", str(prompts), *arguments, *more)


def test_a_configuration_is_written_that_every_command_reads(invoke: Invoke, prompts: Path) -> None:
    results = prompts.parent / "r.json"
    result = tune(invoke, prompts, "--results", str(results))
    assert result.exit_code == 0, result.output
    out = prompts.parent / "forerun.toml"
    tables = tomllib.loads(out.read_text())
    assert tables["generate"]["model"] == "bundled" and tables["generate"]["drafter"]
    from typer.main import get_command

    read = read_config(out, get_command(app))
    assert read["serve"]["drafter"] == [tables["serve"]["drafter"]]
    assert json.loads(results.read_text())["kind"] == "tune"
    assert "Written to" in result.stdout and "over plain" in result.stdout
    assert tune(invoke, prompts).exit_code == 0  # its own file is replaced


def test_the_outcome_for_programs_is_one_object(invoke: Invoke, prompts: Path) -> None:
    found = json.loads(tune(invoke, prompts, "--json").stdout)
    assert found["kind"] == "tune" and found["details"]["verdict"] in ("on", "off", "tie")


def test_a_file_of_others_is_not_replaced(invoke: Invoke, prompts: Path) -> None:
    (prompts.parent / "forerun.toml").write_text("[generate]\n")
    result = tune(invoke, prompts)
    assert result.exit_code == 2 and "was not written by forerun tune" in result.stderr


def test_ctrl_c_writes_what_is_known(invoke: Invoke, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.TimedProgress, "tick", interrupted)
    result = tune(invoke, prompts)
    assert result.exit_code == 130
    assert "Interrupted" in result.stdout and (prompts.parent / "forerun.toml").exists()


@pytest.mark.parametrize(
    ("text", "more", "told"),
    [
        ("", [], "holds no prompts"),
        ('{"prompt": "5 3"}\n', [], "holds 1 prompt, but"),
        ('{"prompt": "5 3"}\n' * 6, ["--load", "4"], "4 requests at once"),
        (f'{{"prompt": "{" 5" * 5000}"}}\n' * 6, [], "exceed the context"),
        ('{"prompt": "5 3"}\n' * 6, ["--minutes", "0.0000001"], "1e-07 minutes are too short"),
    ],
)
def test_what_cannot_be_tuned_is_refused(invoke: Invoke, prompts: Path, text: str, more: list[str], told: str) -> None:
    prompts.write_text(text)
    result = tune(invoke, prompts, *more)
    assert result.exit_code == 2
    assert told in result.stderr
    assert not (prompts.parent / "forerun.toml").exists()


def test_public_drafts_are_listed_for_a_target(invoke: Invoke) -> None:
    text = invoke("drafters", "--for", "Qwen/Qwen2.5-32B-Instruct").stdout
    assert "draft-model:model=Qwen/Qwen2.5-0.5B-Instruct" in text and "licence apache-2.0" in text
    found = json.loads(invoke("drafters", "--for", "bundled", "--json").stdout)
    assert found["public_drafts"] == [] and "draft-model" in found["drafters"]
