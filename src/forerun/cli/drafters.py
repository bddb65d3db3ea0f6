"""`forerun drafters`: which drafters there are, and their options."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Iterator

import typer

from forerun.cli import options
from forerun.cli.output import print_json
from forerun.drafters.option_help import DrafterOption, drafter_options
from forerun.drafters.table import DRAFTERS


def drafters(json: options.Json = False) -> None:
    """List the drafters, with what they draft with and the options that NAME:key=value,key=value may set."""
    from forerun.drafters.third_party import installed_drafters

    if json:
        rows = {
            name: {
                "kind": row.kind,
                "description": row.description,
                "options": {each.name: _facts(each) for each in drafter_options(row)},
                "asks": row.needed_option,
            }
            for name, row in DRAFTERS.items()
        }
        print_json(rows | {name: {"kind": "installed", "class": place} for name, place in installed_drafters().items()})
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 120
    for name, row in DRAFTERS.items():
        typer.echo(textwrap.fill(f"{name}: {row.description}", width, subsequent_indent="    "))
        for each in drafter_options(row):
            typer.echo("\n".join(_lines(each, width)))
    for name, place in installed_drafters().items():
        typer.echo(textwrap.fill(f"{name}: an installed package's, {place}", width, subsequent_indent="    "))
    closing = "Written as NAME, or NAME:key=value,key=value. docs/methods.md tells when each helps."
    typer.echo(textwrap.fill(closing, width))


def _facts(option: DrafterOption) -> dict[str, object]:
    facts = dataclasses.asdict(option)
    del facts["name"]
    return facts


def _lines(option: DrafterOption, width: int) -> Iterator[str]:
    default = option.default if not isinstance(option.default, bool) else str(option.default).lower()
    yield f"    {option.name}={'' if default is None else default} ({option.type})"
    if option.help:
        yield textwrap.fill(option.help, width, initial_indent=" " * 8, subsequent_indent=" " * 8)
