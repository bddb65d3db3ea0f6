"""Command lines of tests, with options that have no flag."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from forerun.cli.main import app


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
