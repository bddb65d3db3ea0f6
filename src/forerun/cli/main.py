"""The `forerun` command. One file per command; torch is loaded by the command that needs it, not by --help."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from forerun import __version__
from forerun.cli import (
    audit,
    batch,
    bench,
    cache,
    demo,
    drafters,
    export,
    fetch,
    generate,
    index,
    info,
    plan,
    quantize,
    serve,
    train,
    tune,
)
from forerun.cli.chat import command as chat
from forerun.cli.precedence import misspelt_variables, read_config, variable_of
from forerun.config import ENVIRONMENT_VARIABLES
from forerun.errors import ForerunError


class Commands(TyperGroup):
    """A group whose commands may raise ForerunError: its message goes to standard error, the exit code is 2.

    --config may stand after the command, too. A wrong value that comes from an environment variable is blamed on it.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, config_first(args))

    def invoke(self, ctx: Any) -> Any:
        try:
            found = super().invoke(ctx)
            sys.stdout.flush()
        except ForerunError as error:
            typer.echo(f"forerun: {error}", err=True)
            raise typer.Exit(2) from None
        except typer.BadParameter as error:
            if variable := variable_of(error):
                error.message += f" It is from the environment variable {variable}."
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            typer.echo(f"forerun: Nothing more can be written: {error.strerror}.", err=True)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is buffered would fail again when Python ends
            raise typer.Exit(2) from None
        return found


def config_first(args: Sequence[str]) -> list[str]:
    """The arguments, with --config and its file before the command; what follows -- stays as it is."""
    end = list(args).index("--") if "--" in args else len(args)
    first: list[str] = []
    rest: list[str] = []
    place = 0
    while place < end:
        is_config = args[place] == "--config" and place + 1 < end
        found = args[place : place + 1 + is_config]
        (first if is_config or found[0].startswith("--config=") else rest).extend(found)
        place += len(found)
    return [*first, *rest, *args[end:]]


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
    for text in misspelt_variables(ctx.command, "FORERUN", os.environ, ENVIRONMENT_VARIABLES):
        typer.echo(f"forerun: {text}", err=True)
    if config is not None:
        ctx.default_map = read_config(config, ctx.command)


app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("batch")(batch.batch)
app.command("audit")(audit.audit)
app.command("demo")(demo.demo)
app.command("fetch")(fetch.fetch)
app.command("quantize")(quantize.quantize)
app.command("plan")(plan.plan)
app.command("tune")(tune.tune)
app.command("drafters")(drafters.drafters)
app.command("info")(info.info)
app.add_typer(bench.app, name="bench")
app.add_typer(train.app, name="train")
app.add_typer(index.app, name="index")
app.add_typer(export.app, name="export")
app.add_typer(cache.app, name="cache")


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
