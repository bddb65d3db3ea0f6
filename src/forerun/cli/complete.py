"""`forerun complete`: the text at a place in a file, between what stands before and behind it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from forerun.chat.infill import Infill
from forerun.cli import options
from forerun.cli.flags import Flags, with_flags
from forerun.cli.generate import end, follow_printing, noting_load, open_llm
from forerun.cli.options import LLMOptions, chosen_model
from forerun.cli.output import text_or_file
from forerun.config import AUTO, SamplingParams
from forerun.errors import ConfigError

_DEFAULTS = SamplingParams(temperature=0.0)


@with_flags
def complete(
    *,
    file: Annotated[Path, typer.Argument(help="The file.", metavar="FILE")],
    at: Annotated[
        str, typer.Option(help="The cursor: line and column, both from 1; the text goes before that column.")
    ],
    extra: Annotated[
        list[Path] | None,
        typer.Option(help="Another file that the model reads, which changes rarely. Repeatable.", metavar="FILE"),
    ] = None,
    model: options.ModelName = None,
    drafter: Annotated[
        str | None,
        typer.Option(help=options.DRAFTER_HELP, metavar="DRAFTER", show_default=options.DEFAULT_DRAFTER_TEXT),
    ] = None,
    settings: Annotated[LLMOptions, Flags(leave_out=options.OF_SERVERS, typed=())],
    threads: options.Threads = None,
    json: options.Json = False,
    params: Annotated[SamplingParams, Flags("temperature", "max_tokens", "stop", "seed", base=_DEFAULTS)],
) -> None:
    """Write what is missing at a place in a file, with a model that fills in the middle.

    The text goes to standard output; the file stays as it is.
    """
    model = chosen_model(model)
    prefix, suffix = divided(text_or_file(f"@{file}", "FILE", ConfigError), at)
    files = [(str(each), text_or_file(f"@{each}", "--extra", ConfigError)) for each in extra or ()]
    options.set_threads(threads)
    with noting_load(model, quiet=json):
        llm = open_llm(model, drafter or AUTO, chat=False, **asdict(settings))
    outputs, times, interrupted = follow_printing(llm, Infill(prefix, suffix, files), params, echo=not json)
    end(llm, model, outputs, times, json=json, interrupted=interrupted)


def divided(text: str, at: str) -> tuple[str, str]:
    """Return a text before and behind LINE:COLUMN. Raises ConfigError if it has no such place."""
    line, _, column = at.partition(":")
    lines = text.split("\n")
    if not (line.isdecimal() and column.isdecimal() and 1 <= int(line) <= len(lines)):
        raise ConfigError(f"--at is {at!r}, but must be LINE:COLUMN with a line of 1..{len(lines)}. Correct it.")
    if not 1 <= int(column) <= len(lines[int(line) - 1]) + 1:
        most = len(lines[int(line) - 1]) + 1
        raise ConfigError(f"--at is {at!r}, but line {line} has the columns 1..{most}. Correct it.")
    start = sum(len(each) + 1 for each in lines[: int(line) - 1]) + int(column) - 1
    return text[:start], text[start:]
