"""`forerun bench report`: measured results and servers' journals as Markdown, as JSON and as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli.bench.shared import STDOUT, say, write_text
from forerun.cli.flags import Flags, with_flags
from forerun.errors import ConfigError
from forerun.utils.fields import option

if TYPE_CHECKING:
    from forerun.lab.results.schema import Results

Files = Annotated[
    list[Path],
    typer.Argument(
        help="Files that `forerun bench ... --json FILE` or `forerun serve --journal FILE` wrote.", metavar="FILE"
    ),
]


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What is written; '-' stands for standard output."""

    markdown: Path | None = option(
        None,
        "Write Markdown: commands, machines, warnings and tables.",
        metavar="FILE",
        default_text="standard output, if nothing else is asked for",
    )
    json: Path | None = option(None, "Write all results and the warnings as one JSON object.", metavar="FILE")
    pictures: Path | None = option(None, "Draw pictures into this folder, as PNG.", metavar="FOLDER")
    into: Path | None = option(
        None, "Put the main figures between the marks of this Markdown file, such as a README.", metavar="FILE"
    )
    head: Path | None = option(None, "Markdown that comes before the sections of --markdown.", metavar="FILE")


@with_flags
def report(files: Files, *, wanted: Annotated[ReportOptions, Flags()]) -> None:
    """Any results of `forerun bench` and journals of servers in one page, with warnings about what weakens them."""
    from forerun.lab.bench.report.headline import put_into, sections
    from forerun.lab.bench.report.markdown import markdown, warnings_of
    from forerun.lab.bench.report.pictures import check_installed, draw

    is_asked = any((wanted.json, wanted.pictures, wanted.into))
    page = wanted.markdown or (None if is_asked else Path(STDOUT))
    head = "" if wanted.head is None else _read(wanted.head)
    if wanted.pictures is not None:
        check_installed()
    every = [_results(path) for path in files]
    for text in warnings_of(every):
        say(text)
    if page is not None:
        write_text(page, markdown(every, head))
    if wanted.into is not None:
        write_text(wanted.into, put_into(wanted.into, sections(every)))
    if wanted.json is not None:
        write_text(wanted.json, _as_json(every))
    if wanted.pictures is not None:
        say(f"{len(draw(every, wanted.pictures))} pictures are in {wanted.pictures}")


def _results(path: Path) -> Results:
    """What a file holds, or a journal comes to. Raises ConfigError."""
    from forerun.lab.bench.journal import is_journal, journal_results
    from forerun.lab.results.files import load

    return journal_results(path) if is_journal(path) else load(path)


def _as_json(every: Sequence[Results]) -> str:
    import json

    from forerun.lab.bench.report.markdown import warnings_of
    from forerun.lab.results.files import as_object

    found = {"warnings": warnings_of(every), "results": [{"file": each.file_name} | as_object(each) for each in every]}
    return json.dumps(found, ensure_ascii=False) + "\n"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--head is {path}, which cannot be read: {error}. Give a file of Markdown in UTF-8."
        ) from None
