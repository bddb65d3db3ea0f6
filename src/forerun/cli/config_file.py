"""The --config file: where a flag that is not typed gets its value; and the keys that rarely used options have.

A flag's value comes from the command line, else from the file (`[generate]`, `model = "bundled"`), else it is the
default. Rarely used options have no flag, only a key of the file.
"""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.drafters.third_party import named_module
from forerun.errors import ConfigError
from forerun.utils.habits import hint


def read_config(path: Path, command: Any) -> dict[str, Any]:
    """Read the defaults in a configuration file, by command and parameter.

    Raises:
        ConfigError: the file cannot be read, or names a command or flag that does not exist.
    """
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"The configuration file {path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, too many digits, nested too deeply
        raise ConfigError(f"The configuration file {path} is not TOML: {error}.") from None
    return _check_table(tables, command, str(path), "")


def show_keys(
    ctx: typer.Context,
    words: Annotated[list[str], typer.Argument(help="Such as `serve`, or `train eagle`.", metavar="COMMAND")],
) -> None:
    """Show the keys of a command in a --config file, those without a flag too, as TOML with what each does."""
    command: Any = ctx.find_root().command
    for word in words:
        below = getattr(command, "commands", {})
        if word not in below:
            raise ConfigError(f"There is no command {word!r}. There is: {', '.join(sorted(below)) or 'none below it'}.")
        command = below[word]
    if names := getattr(command, "commands", None):
        raise ConfigError(f"{' '.join(words)} has a table for each of {', '.join(sorted(names))}. Name one of them.")
    typer.echo(f"[{'.'.join(json.dumps(word) if '.' in word else word for word in words)}]")
    for each in command.params:
        about = f"{each.help} {'' if each.hidden else 'Has a flag.'}".rstrip()
        typer.echo(textwrap.fill(about, 120, initial_indent="# ", subsequent_indent="# "))
        start = each.default
        value = (each.metavar or each.name.upper()) if start is None else json.dumps(start, default=str)
        typer.echo(f"# {each.name} = {value}")


def _check_table(table: dict[str, Any], command: Any, path: str, where: str) -> dict[str, Any]:
    """Return the table with names of parameters as keys. Raises ConfigError for unknown keys and wrong values."""
    subcommands = getattr(command, "commands", {})
    flags = {} if subcommands else {key: flag for flag in command.params for key in _keys(flag)}
    checked: dict[str, Any] = {}
    for key, value in table.items():
        if key in subcommands and isinstance(value, dict):
            checked[key] = _check_table(value, subcommands[key], path, f"{where}{key}.")
            continue
        name = key.replace("-", "_")
        if name not in flags:
            known = sorted(subcommands or flags)
            remedy = hint(name, known, repr) or f"Known here: {', '.join(known)}."
            raise ConfigError(f"The configuration file {path} sets {where + key!r}, which does not exist. {remedy}")
        _refuse_modules(flags[name], value, path, where + key)
        try:
            checked[flags[name].name] = _check_value(flags[name], value, typer.Context(command))
        except typer.BadParameter as error:
            raise ConfigError(
                f"The configuration file {path} sets {where + key!r} to {value!r}: {error.message}"
            ) from None
    return checked


def _check_value(flag: Any, value: Any, ctx: typer.Context) -> Any:
    """Return the value in the form that the flag takes. Raises typer.BadParameter if the flag does not take it.

    A repeatable flag takes a list, or a single value.
    """
    several = getattr(flag, "multiple", False) or flag.nargs != 1
    values = value if several and isinstance(value, list) else [value]
    switch = getattr(flag, "is_flag", False)
    for each in values:
        if isinstance(each, (dict, list)):
            raise typer.BadParameter("a flag takes text, numbers, or true and false.")
        if isinstance(each, bool) and not switch:
            raise typer.BadParameter("true and false are for switches; this flag takes a value.")
        if switch and not isinstance(each, (bool, str)):
            raise typer.BadParameter("this flag is a switch. Give true or false.")
    flag.process_value(ctx, values if several else value)
    return values if several else value


def _refuse_modules(flag: Any, value: Any, path: str, key: str) -> None:
    """Raise ConfigError if a value would run code: the file may not be of the user's making."""
    if flag.name == "peer":
        raise ConfigError(
            f"The configuration file {path} sets {key!r}, which would run a program. A file may not name code to run. "
            "Give it on the command line."
        )
    if flag.name == "ray_address":
        raise ConfigError(
            f"The configuration file {path} sets {key!r}, and a cluster may run any code here. A file may not do that. "
            "Give it on the command line."
        )
    if "draft" not in flag.name:
        return
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and (module := named_module(text)) is not None:
            raise ConfigError(
                f"The configuration file {path} sets {key!r} to {value!r}, which would import {module}. A file may not "
                "name code to run. Give it on the command line, or install the drafter with an "
                "entry point and give its name."
            )


def _keys(flag: Any) -> set[str]:
    """Return the names of a flag in a configuration file: its spellings without dashes."""
    return {flag.name} | {option.lstrip("-").replace("-", "_") for option in flag.opts if option.startswith("--")}


def config_first(args: Sequence[str]) -> list[str]:
    """Move --config and its file before the command; arguments after -- stay."""
    end = list(args).index("--") if "--" in args else len(args)
    first: list[str] = []
    others: list[str] = []
    position = 0
    while position < end:
        is_config = args[position] == "--config" and position + 1 < end
        found = args[position : position + 1 + is_config]
        (first if is_config or found[0].startswith("--config=") else others).extend(found)
        position += len(found)
    return [*first, *others, *args[end:]]
