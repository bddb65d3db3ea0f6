"""What the tests of the command line share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from forerun.cli.main import app

Invoke = Callable[..., Result]


def keys_in_file(arguments: Iterable[str], file: Path) -> list[str]:
    """The arguments, those without a flag as keys of this configuration file, before the command."""
    command: Any = typer.main.get_command(app)
    words, keys, rest = [], {}, iter(arguments)
    kept: list[str] = []
    for word in rest:
        if word in getattr(command, "commands", {}):
            command = command.commands[word]
            words.append(word)
        hidden = next((each for each in command.params if each.hidden and word in each.opts), None)
        if hidden is None:
            kept.append(word)
        elif hidden.is_flag:
            keys[hidden.name] = ["true"]
        else:
            keys.setdefault(hidden.name, []).append(next(rest))
    if not keys:
        return kept
    written = [f"{name} = {json.dumps(value if len(value) > 1 else value[0])}" for name, value in keys.items()]
    file.write_text("\n".join([f"[{'.'.join(json.dumps(word) for word in words)}]", *written, ""]))
    return ["--config", str(file), *kept]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Invoke:
    """Run the command as a shell would, wide enough that help is not cut; what has no flag is put into a file."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, **settings: Any) -> Result:
        file = tmp_path_factory.mktemp("keys") / "keys.toml"
        return CliRunner().invoke(app, keys_in_file(arguments, file), **settings)

    return run
