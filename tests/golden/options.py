"""All options of the command line and of drafters, with their defaults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

import typer

from forerun import SamplingParams
from forerun.cli.main import app
from forerun.config import ENVIRONMENT_VARIABLES, EngineConfig
from forerun.drafters import DRAFTERS
from forerun.drafters.option_help import drafter_options


def text() -> str:
    """Return a line for each option: names, or "key" where there is a key of `--config` alone, and the default."""
    lines = ["# Options of commands"]
    for path, command in _commands(typer.main.get_command(app), ("forerun",)):
        lines += ["", f"## {' '.join(path)}", *sorted(map(_option, command.params))]
    lines += ["", "# Options of drafters"]
    for name, row in DRAFTERS.items():
        lines += [
            "",
            f"## {name}",
            *sorted(f"{each.name}: {each.type} = {each.default!r}" for each in drafter_options(row)),
        ]
    for each in (SamplingParams, EngineConfig):
        lines += ["", f"# Fields of {each.__name__}", "", *_fields(each)]
    lines += ["", "# Environment variables", "", *sorted(ENVIRONMENT_VARIABLES)]
    return "\n".join(lines) + "\n"


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for word, below in sorted(getattr(command, "commands", {}).items()):
        yield from _commands(below, (*path, word))


def _option(each: Any) -> str:
    hidden = each.param_type_name == "option" and each.hidden
    spelled = f"key {each.name}" if hidden else " ".join([*each.opts, *each.secondary_opts])
    several = " ..." if getattr(each, "multiple", False) or each.nargs != 1 else ""
    default = "required" if each.required else repr(each.default)
    return f"{spelled}{several} = {default}"


def _fields(kind: Any) -> Iterator[str]:
    for each in sorted(fields(kind), key=lambda field: field.name):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        yield f"{each.name} = {'required' if default is MISSING else repr(default)}"
