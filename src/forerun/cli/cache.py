"""`forerun cache`: what forerun keeps on disk, and its removal by name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.output import print_json, size_text
from forerun.errors import ConfigError
from forerun.fetch import kept
from forerun.home import home

app = typer.Typer(help="What forerun keeps on disk: fetched models, measured costs, the hub's models.")
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@app.callback(invoke_without_command=True)
def show(ctx: typer.Context, json: options.Json = False) -> None:
    """List what lies in FORERUN_HOME, and the models of the Hugging Face Hub's cache that forerun may load."""
    if ctx.invoked_subcommand is not None:
        if json:
            raise ConfigError(f"--json is of the list, not of {ctx.invoked_subcommand}. Leave it out.")
        return
    entries, base = kept.kept(), home()
    if json:
        facts = {"home": None if base is None else str(base), "entries": [_facts(entry) for entry in entries]}
        print_json(facts | {"bytes": sum(entry.nbytes for entry in entries)})
        return
    typer.echo(f"FORERUN_HOME: {base or 'none'}")
    for line in _lines(entries):
        typer.echo(line)


@app.command()
def clear(
    names: Annotated[list[str], typer.Argument(help="Entries, by their exact names.", metavar="NAME")],
    yes: Yes = False,
    json: options.Json = False,
) -> None:
    """Remove entries, by the names that `forerun cache` lists."""
    entries = kept.find(names)
    if not yes:
        if json or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise ConfigError("Nothing is removed without being asked, and there is nobody to ask. Give --yes.")
        for line in _lines(entries):
            typer.echo(line, err=True)
        typer.confirm("Remove this?", abort=True, err=True)
    for entry in entries:
        kept.clear(entry)
        if not json:
            typer.echo(f"removed {entry.name}, {size_text(entry.nbytes)}")
    if json:
        print_json({"removed": [_facts(entry) for entry in entries]})


def _lines(entries: Sequence[kept.Kept]) -> list[str]:
    """A table: name, kind, size, place."""
    if not entries:
        return ["Nothing is kept."]
    rows = [(entry.name, entry.kind, size_text(entry.nbytes), _place(entry)) for entry in entries]
    rows.append(("total", "", size_text(sum(entry.nbytes for entry in entries)), ""))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {size:>{widths[2]}}  {place}".rstrip()
        for name, kind, size, place in rows
    ]


def _place(entry: kept.Kept) -> str:
    return str(entry.path) if entry.whole else f"{entry.path} (not whole: fetch it again, or clear it)"


def _facts(entry: kept.Kept) -> dict[str, Any]:
    return {
        "name": entry.name,
        "kind": entry.kind,
        "bytes": entry.nbytes,
        "path": str(entry.path),
        "whole": entry.whole,
    }
