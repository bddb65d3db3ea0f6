"""`forerun bench report`: measured results as a page, as Markdown, as JSON and as CSV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli.bench.shared import say, write_text
from forerun.cli.flags import Flags, with_flags
from forerun.errors import ConfigError
from forerun.fields import option

if TYPE_CHECKING:
    from forerun.results import Results

PAGE = Path("report.html")
Files = Annotated[list[Path], typer.Argument(help="Files that `forerun bench ... --json FILE` wrote.", metavar="FILE")]


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What is written; '-' stands for standard output."""

    html: Path | None = option(
        None, "Write one page with pictures.", metavar="FILE", default_text=f"{PAGE}, if nothing else is asked for"
    )
    markdown: Path | None = option(None, "Write Markdown: commands, machines, warnings and tables.", metavar="FILE")
    json: Path | None = option(None, "Write all results and the warnings as one JSON object.", metavar="FILE")
    csv: Path | None = option(None, "Write a line per figure, with its interval and what it is of.", metavar="FILE")
    into: Path | None = option(
        None, "Put the main figures between the marks of this Markdown file, such as a README.", metavar="FILE"
    )
    head: Path | None = option(None, "Markdown that comes before the sections of --markdown.", metavar="FILE")


@with_flags
def report(files: Files, *, wanted: Annotated[ReportOptions, Flags()]) -> None:
    """One page from any results of `forerun bench`, with warnings about what weakens them."""
    from forerun.bench.summary.draw import check_installed
    from forerun.bench.summary.headline import put_into, sections
    from forerun.bench.summary.text import csv_lines, markdown
    from forerun.bench.summary.warnings import warnings_of
    from forerun.results import load

    html = PAGE if not any((wanted.html, wanted.markdown, wanted.json, wanted.csv, wanted.into)) else wanted.html
    head = "" if wanted.head is None else _read(wanted.head)
    if html is not None:
        check_installed()
    every = [load(path) for path in files]
    for text in warnings_of(every):
        say(text)
    if html is not None:
        from forerun.bench.summary.page import page

        write_text(html, page(every))
    if wanted.markdown is not None:
        write_text(wanted.markdown, markdown(every, head))
    if wanted.into is not None:
        write_text(wanted.into, put_into(wanted.into, sections(every)))
    if wanted.csv is not None:
        write_text(wanted.csv, csv_lines(every))
    if wanted.json is not None:
        write_text(wanted.json, _as_json(every))


def _as_json(every: Sequence[Results]) -> str:
    import json

    from forerun.bench.summary.facts import file_name
    from forerun.bench.summary.warnings import warnings_of
    from forerun.results import as_object

    found = {"warnings": warnings_of(every), "results": [{"file": file_name(each)} | as_object(each) for each in every]}
    return json.dumps(found, ensure_ascii=False) + "\n"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--head is {path}, which cannot be read: {error}. Give a file of Markdown in UTF-8."
        ) from None
