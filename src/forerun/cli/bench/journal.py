"""`forerun bench journal`: what a server's traffic was, and what it would have taken with other drafts or none."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli.bench.shared import STDOUT, check_json, say, write_text
from forerun.cli.flags import Flags, with_flags
from forerun.cli.output import terminal_width
from forerun.errors import ConfigError
from forerun.fields import option

if TYPE_CHECKING:
    from forerun.bench.journal.scenarios import OtherDrafter
    from forerun.results import Results

File = Annotated[Path, typer.Argument(help="What `forerun serve --journal FILE` wrote.", metavar="FILE")]


@dataclass(frozen=True, slots=True)
class JournalOptions:
    """What is asked, and what is written; '-' stands for standard output."""

    tune: Path | None = option(
        None, "Ask about another drafter, too: results of `forerun tune --results FILE`.", metavar="FILE"
    )
    arm: str | None = option(
        None, "Which of its arms, as it names them.", metavar="ARM", default_text="what the tuning has chosen"
    )
    html: Path | None = option(None, "Write one page with pictures.", metavar="FILE")
    markdown: Path | None = option(None, "Write Markdown: tables and warnings.", metavar="FILE")
    json: Path | None = option(None, "Write the results, for `forerun bench report`.", metavar="FILE")


@with_flags
def journal(file: File, *, wanted: Annotated[JournalOptions, Flags()]) -> None:
    """Show a server's traffic by category, and replay it without speculation or with another drafter."""
    from forerun.bench.journal.summary import make_report
    from forerun.bench.summary.draw import check_installed
    from forerun.bench.summary.warnings import weaknesses
    from forerun.results import Watch
    from forerun.results.write import command_line
    from forerun.traffic.reader import read_journal

    if wanted.arm is not None and wanted.tune is None:
        raise ConfigError("--arm names an arm of a tuning, and there is no --tune. Give both, or leave it out.")
    if wanted.html is not None:
        check_installed()
    check_json(wanted.json)
    watch = Watch.begin()
    traffic = read_journal(file)
    drafter = None if wanted.tune is None else _other(wanted.tune, wanted.arm)
    report = make_report(traffic, drafter, {"arm": drafter.name} if drafter is not None else {})
    results = report.results(command_line(sys.argv[1:]), watch.environment())
    for text in weaknesses(results):
        say(text)
    if STDOUT not in map(str, (wanted.html, wanted.markdown, wanted.json)):
        typer.echo(report.text(results.environment, width=terminal_width()))
    _written(results, wanted)


def _other(path: Path, arm: str | None) -> OtherDrafter:
    """The drafter of a tuning's results. Raises ConfigError."""
    from forerun.bench.journal.scenarios import OtherDrafter
    from forerun.results import load

    return OtherDrafter.of(load(path), arm)


def _written(results: Results, wanted: JournalOptions) -> None:
    """The files that were asked for."""
    from forerun.bench.summary.page import page
    from forerun.bench.summary.text import markdown
    from forerun.results import text_of

    if wanted.html is not None:
        write_text(wanted.html, page([results]))
    if wanted.markdown is not None:
        write_text(wanted.markdown, markdown([results]))
    if wanted.json is not None:
        write_text(wanted.json, text_of(results))
