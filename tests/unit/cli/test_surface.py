"""How much the command line asks a reader to know: commands and flags, each number raised on purpose alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import typer

from forerun.cli.main import app

from .conftest import Invoke

COMMANDS = 43
FLAGS = {
    "generate": 31, "chat": 23, "complete": 11, "serve": 39, "batch": 20,
    "demo": 8, "audit": 12, "try": 2, "tune": 11, "bench": 84,
    "train": 49, "export": 11,
    "adapt": 3, "cache": 3, "drafters": 2, "fetch": 3, "index": 8, "info": 6, "models": 1, "options": 0, "plan": 12,
    "quantize": 4,
}  # fmt: skip
"""Command -> flags of it and of what is below it, at most."""
ROOM = 344
"""For all of them."""
KEYS = {
    "generate": 15, "chat": 8, "complete": 11, "serve": 11, "batch": 3,
    "demo": 2, "audit": 6, "try": 1, "tune": 3,
    "train": 48, "export": 2,
    "index": 3, "info": 6, "plan": 3,
}  # fmt: skip
"""Command -> keys of its table in a --config file that have no flag, at most."""
SHOWN = {
    "Run": ["generate", "chat", "complete", "serve", "batch"],
    "Measure": ["demo", "audit", "try", "tune", "bench"],
    "Make": ["train", "export"],
}


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The command and all below it, by their words."""
    yield path, command
    for word, below in getattr(command, "commands", {}).items():
        yield from walk(below, (*path, word))


def test_commands_and_flags_are_few() -> None:
    found: Counter[str] = Counter()
    keys: Counter[str] = Counter()
    num_commands = 0
    for path, command in walk(typer.main.get_command(app)):
        if path == ("run",):  # chat by another name
            continue
        num_commands += not hasattr(command, "commands")
        if path:
            hidden = [each.hidden for each in command.params if each.opts[0].startswith("-")]
            found[path[0]] += hidden.count(False)
            keys[path[0]] += hidden.count(True)
    assert found.keys() == FLAGS.keys() and num_commands <= COMMANDS
    assert {name: count for name, count in found.items() if count > FLAGS[name]} == {}
    assert {name: count for name, count in keys.items() if count > KEYS.get(name, 0)} == {}
    assert sum(found.values()) <= ROOM


def test_help_shows_twelve_commands_in_three_groups(invoke: Invoke) -> None:
    root: Any = typer.main.get_command(app)
    shown: dict[str, list[str]] = {}
    for name, command in root.commands.items():
        if not command.hidden:
            shown.setdefault(command.rich_help_panel, []).append(name)
    assert shown == SHOWN
    text = invoke("--help").stdout
    assert all(f" {panel} " in text and all(f"│ {name} " in text for name in names) for panel, names in SHOWN.items())
    told = text.partition("More commands")[2]
    assert all(name in told for name, command in root.commands.items() if command.hidden)
