"""`forerun drafters`: list the drafters and their options."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import shlex
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.output import print_json, size_text, terminal_width
from forerun.drafters.option_help import DrafterOption, class_options, drafter_options
from forerun.drafters.registry import DRAFTERS
from forerun.drafters.third_party import find_class, installed_drafters, named_module
from forerun.errors import ConfigError
from forerun.lab.tune.public_drafts import public_drafts


def drafters(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A drafter, to list its options: NAME, or MODULE:CLASS of a package.",
            metavar="NAME",
            show_default="all",
        ),
    ] = None,
    for_model: Annotated[
        str | None,
        options.model_option(
            *("--for", "--model", "-m"),
            about="A target: list the drafters that serve it, and its public drafts.",
            default="none",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """List the drafters, a line each; of NAME the options that NAME:key=value,key=value may set."""
    if for_model is not None:
        _list_for(for_model, json)
        return
    if name is not None:
        _show(name, json)
        return
    if json:
        rows = {
            name: {
                "kind": row.kind,
                "description": row.description,
                "options": _options_in_json(drafter_options(row)),
                "asks": row.needed_option,
            }
            for name, row in DRAFTERS.items()
        }
        print_json(rows | {name: {"kind": "installed", "class": place} for name, place in installed_drafters().items()})
        return
    texts = {name: row.description for name, row in DRAFTERS.items()}
    texts |= {name: f"an installed package's, {place}" for name, place in installed_drafters().items()}
    width = terminal_width()
    column = max(map(len, texts))
    for name, about in texts.items():
        line = f"{name:<{column}}  {about}"
        typer.echo(line if width is None or len(line) <= width else f"{line[: width - 1]}…")
    if width is not None:
        typer.echo("forerun drafters NAME lists the options of one; docs/methods.md describes when each helps.")


def _show(text: str, json: bool) -> None:
    """Print one drafter's description and options."""
    name, about, found = _described(text)
    if json:
        print_json({name: {"description": about, "options": _options_in_json(found)}})
        return
    width = terminal_width() or 120
    typer.echo(textwrap.fill(f"{name}: {about}", width, subsequent_indent="    "))
    for each in found:
        typer.echo("\n".join(_lines(each, width)))
    typer.echo(f"Written as {name}, or {name}:key=value,key=value; values with commas or plus signs in double quotes.")


def _described(text: str) -> tuple[str, str, list[DrafterOption]]:
    """Return name, description and options of what --drafter takes by this text, whatever options follow in it."""
    name = text.partition(":")[0]
    if name in DRAFTERS:
        return name, DRAFTERS[name].description, drafter_options(DRAFTERS[name])
    found = find_class(text)
    if found is None:
        near = difflib.get_close_matches(name, DRAFTERS, n=1)
        hint = f"Did you mean {near[0]}?" if near else "forerun drafters lists them."
        raise ConfigError(f"There is no drafter {name!r}. {hint}")
    made, _ = found
    about = (inspect.getdoc(made) or "no description").partition("\n\n")[0]
    return named_module(text) or name, about.replace("\n", " "), class_options(made)


def _options_in_json(found: list[DrafterOption]) -> dict[str, dict[str, Any]]:
    return {(facts := dataclasses.asdict(each)).pop("name"): facts for each in found}


def _list_for(model: str, json: bool) -> None:
    """List what belongs to a target on this machine, the drafters that serve it without options, and public drafts."""
    from forerun.drafters.belonging import belonging

    here = belonging(model)
    serving = [name for name, row in DRAFTERS.items() if row.serves(model)]
    public = public_drafts(model)
    if json:
        rows = [dataclasses.asdict(each) | {"text": each.text} for each in public]
        print_json({"model": model, "belonging": here, "drafters": serving, "public_drafts": rows})
        return
    for each in here:
        gain = each.predicted_speedup
        told = "unknown until measured" if gain is None else f"{gain:.2f} of plain decoding, as its card predicts"
        typer.echo(f"--drafter {shlex.quote(each.text)}\n    {each.what}, {each.place}; speed: {told}")
    if not here:
        typer.echo(f"No head or smaller model of {model} is on this machine; forerun train makes one.")
    typer.echo(f"Without options: {', '.join(serving)}.")
    for draft in public:
        size = f"{draft.parameters / 1e9:.2g} B parameters, {size_text(draft.nbytes)}, licence {draft.licence}"
        typer.echo(f"--drafter {shlex.quote(draft.text)}\n    public, fetched when first named: {size}")
    typer.echo(f"Which of them is the fastest here: forerun try {model}")


def _lines(option: DrafterOption, width: int) -> Iterator[str]:
    default = option.default if not isinstance(option.default, bool) else str(option.default).lower()
    yield f"    {option.name}={'' if default is None else default} ({option.type})"
    if option.help:
        yield textwrap.fill(option.help, width, initial_indent=" " * 8, subsequent_indent=" " * 8)
