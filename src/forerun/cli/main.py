"""The `forerun` command. One file per command; torch is loaded by the command that needs it, not by --help.

Where a value comes from, first found wins: the flag, the environment variable (FORERUN_GENERATE_MODEL for
`forerun generate --model`), the configuration file (`[generate]`, `model = ...`), the default.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from forerun import __version__
from forerun.cli import bench, demo, drafters, generate, index, make, train
from forerun.errors import ConfigError, ForerunError


class Commands(TyperGroup):
    """A group whose commands may raise ForerunError: its message goes to standard error, the exit code is 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ForerunError as error:
            typer.echo(f"forerun: {error}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    name="forerun",
    cls=Commands,
    help="Exact speculative decoding for Hugging Face models: the same text, sooner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"auto_envvar_prefix": "FORERUN", "help_option_names": ["-h", "--help"]},
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"forerun {__version__}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file with a table per command and a key per flag.", metavar="FILE")
    ] = None,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Show the version and leave.",
            callback=_show_version,
            is_eager=True,
            show_envvar=False,
            allow_from_autoenv=False,
        ),
    ] = False,
) -> None:
    if config is not None:
        ctx.default_map = read_config(config, ctx.command)


app.command("generate")(generate.generate)
app.command("demo")(demo.demo)
app.command("drafters")(drafters.drafters)
app.add_typer(bench.app, name="bench")
app.add_typer(train.app, name="train")
app.add_typer(make.app, name="make")
app.add_typer(index.app, name="index")


def read_config(path: Path, command: Any) -> dict[str, Any]:
    """The defaults in a configuration file, by command and parameter.

    Raises:
        ConfigError: the file cannot be read, or names a command or flag that does not exist.
    """
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"The configuration file {path} cannot be read: {error.strerror}.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"The configuration file {path} is not TOML: {error}.") from None
    return _checked(tables, command, str(path), "")


def _checked(table: dict[str, Any], command: Any, path: str, where: str) -> dict[str, Any]:
    """The table with dashes turned into underscores; every key must be a subcommand or a flag of the command."""
    subcommands = getattr(command, "commands", {})
    flags = {} if subcommands else {key: flag.name for flag in command.params for key in _keys(flag)}
    checked: dict[str, Any] = {}
    for key, value in table.items():
        if key in subcommands and isinstance(value, dict):
            checked[key] = _checked(value, subcommands[key], path, f"{where}{key}.")
            continue
        name = key.replace("-", "_")
        if name not in flags:
            known = sorted(subcommands or flags)
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Known here: {', '.join(known)}."
            raise ConfigError(f"The configuration file {path} sets {where + key!r}, which does not exist. {hint}")
        checked[flags[name]] = value
    return checked


def _keys(flag: Any) -> set[str]:
    """How a configuration file may call a flag: as it is written, without its dashes."""
    return {flag.name} | {option.lstrip("-").replace("-", "_") for option in flag.opts if option.startswith("--")}


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
