"""`forerun bench report`: write results and servers' journals as Markdown, JSON and pictures."""

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
    """Output files; '-' stands for standard output."""

    markdown: Path | None = option(
        None,
        "Write Markdown: commands, machines, warnings and tables.",
        metavar="FILE",
        default_text="standard output, without other output",
    )
    json: Path | None = option(None, "Write all results and the warnings as one JSON object.", metavar="FILE")
    pictures: Path | None = option(None, "Draw pictures into this folder, as PNG.", metavar="FOLDER")
    into: Path | None = option(
        None, "Put the main figures between the marks of this Markdown file, such as a README.", metavar="FILE"
    )
    head: Path | None = option(None, "Markdown that comes before the sections of --markdown.", metavar="FILE")


@with_flags
def report(files: Files, *, output: Annotated[ReportOptions, Flags()]) -> None:
    """Collect results of `forerun bench` and journals of servers in one page, with warnings about their weaknesses."""
    from forerun.lab.bench.report.headline import put_into, sections
    from forerun.lab.bench.report.markdown import markdown, warnings_of
    from forerun.lab.bench.report.pictures import check_installed, draw

    page = output.markdown or (None if output.json or output.pictures or output.into else Path(STDOUT))
    head = "" if output.head is None else _read(output.head)
    if output.pictures is not None:
        check_installed()
    every = [_results(path) for path in files]
    for text in warnings_of(every):
        say(text)
    if page is not None:
        write_text(page, markdown(every, head))
    if output.into is not None:
        write_text(output.into, put_into(output.into, sections(every)))
    if output.json is not None:
        write_text(output.json, _as_json(every))
    if output.pictures is not None:
        say(f"{len(draw(every, output.pictures))} pictures are in {output.pictures}")


def _results(path: Path) -> Results:
    """Read a file of results, or reduce a journal to results. Raises ConfigError."""
    from forerun.lab.bench.journal import is_journal, journal_results
    from forerun.lab.results.files import load_results

    return journal_results(path) if is_journal(path) else load_results(path)


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
