"""The `forerun` command: its subcommands, its configuration file, and its errors. --help does not import torch."""

from __future__ import annotations

import difflib
import errno
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from forerun import __version__
from forerun.cli import (
    adapt,
    audit,
    batch,
    bench,
    cache,
    complete,
    demo,
    drafters,
    export,
    fetch,
    generate,
    index,
    info,
    models,
    plan,
    quantize,
    serve,
    train,
    try_,
    tune,
)
from forerun.cli.chat.command import chat
from forerun.cli.config_file import config_first, read_config, show_keys
from forerun.cli.flags import unknown_flag
from forerun.config import ENVIRONMENT_VARIABLES
from forerun.errors import ForerunError

UsageError: Any = typer.BadParameter.__base__
"""Click's, which Typer brings along."""


class Commands(TyperGroup):
    """A group whose commands may raise ForerunError: its message goes to standard error, the exit code is 2.

    --config may stand after the command, too.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._model_as_argument(config_first(args)))

    def _model_as_argument(self, args: list[str]) -> list[str]:
        """Take --model MODEL for the argument of commands that have it as one."""
        at = next((at for at, arg in enumerate(args) if arg in self.commands), None)
        if at is None:
            return args
        command: Any = self.commands[args[at]]
        while at + 1 < len(args) and args[at + 1] in getattr(command, "commands", {}):
            at += 1
            command = command.commands[args[at]]
        models = [each for each in command.params if "model" in (each.name, *each.opts)]
        end = args.index("--") if "--" in args else len(args)
        if [each.param_type_name for each in models] != ["argument"]:
            return args
        for place in range(at + 1, end):
            flag, equals, value = args[place].partition("=")
            if flag.startswith("-m") and flag != "-m":  # -mVALUE
                flag = "-m"
                equals = "="
                value = args[place][2:]
            if flag in ("--model", "-m") and (equals or place + 1 < end):
                rest = args[place + 1 :] if equals else args[place + 2 :]
                return [*args[: at + 1], value if equals else args[place + 1], *args[at + 1 : place], *rest]
        return args

    def invoke(self, ctx: Any) -> Any:
        try:
            with generate.OPENED:
                found = super().invoke(ctx)
            sys.stdout.flush()
        except UsageError as error:
            raise unknown_flag(error) from None
        except ForerunError as error:
            typer.echo(f"forerun: {error}", err=True)
            raise typer.Exit(2) from None
        return found


app = typer.Typer(
    name="forerun",
    cls=Commands,
    help="Exact speculative decoding for Hugging Face models: the same text, sooner.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="More commands, each with its --help: adapt, cache, drafters, fetch, index, info, models, options, plan, "
    "quantize, run (chat by its other name).",
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
        ),
    ] = False,
) -> None:
    for name in sorted(os.environ.keys() - ENVIRONMENT_VARIABLES):
        if near := difflib.get_close_matches(name, ENVIRONMENT_VARIABLES, n=1, cutoff=0.85):
            text = f"The environment variable {name} is not read, and has no effect. Did you mean {near[0]}?"
            typer.echo(f"forerun: {text}", err=True)
    if config is not None:
        ctx.default_map = read_config(config, ctx.command)


_COMMANDS: dict[str | None, dict[str, Any]] = {
    "Run": {
        "generate": generate.generate,
        "chat": chat,
        "complete": complete.complete,
        "serve": serve.serve,
        "batch": batch.batch,
    },
    "Measure": {"demo": demo.demo, "audit": audit.audit, "try": try_.try_, "tune": tune.tune},
    None: {
        "run": chat,
        "models": models.models,
        "fetch": fetch.fetch,
        "quantize": quantize.quantize,
        "plan": plan.plan,
        "drafters": drafters.drafters,
        "info": info.info,
        "options": show_keys,
    },
}
"""Heading in help -> commands; None for those that help does not list."""
_GROUPS: dict[str, tuple[typer.Typer, str | None]] = {
    "adapt": (adapt.app, None),
    "bench": (bench.app, "Measure"),
    "train": (train.app, "Make"),
    "export": (export.app, "Make"),
    "index": (index.app, None),
    "cache": (cache.app, None),
}
for panel, commands in _COMMANDS.items():
    for name, command in commands.items():
        app.command(name, rich_help_panel=panel, hidden=panel is None)(command)
for name, (group, heading) in _GROUPS.items():
    app.add_typer(group, name=name, rich_help_panel=heading, hidden=heading is None)


def main() -> None:
    """Run the console script."""
    try:
        app(prog_name="forerun")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EBADF):
            raise
        reason = "standard output is closed" if error.errno == errno.EBADF else error.strerror
        typer.echo(f"forerun: Nothing more can be written: {reason}.", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is buffered would fail again when Python ends
        sys.exit(2)


if __name__ == "__main__":
    main()
