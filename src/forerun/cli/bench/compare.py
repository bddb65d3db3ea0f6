"""`forerun bench compare`: check whether new results are worse than old ones, for continuous integration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forerun.cli import options
from forerun.cli.bench.shared import say
from forerun.cli.flags import Flags, with_flags
from forerun.cli.output import print_json
from forerun.errors import ConfigError
from forerun.utils.fields import Checked, check_options, option

WORSE_EXIT = 1
Old = Annotated[Path, typer.Argument(help="Results of `forerun bench generate --json FILE`.", metavar="OLD")]
New = Annotated[Path, typer.Argument(help="Results of the same prompts, later.", metavar="NEW")]


@dataclass(frozen=True, slots=True)
class JudgedOptions(Checked):
    """Which figures are compared, and how strictly."""

    figures: str = option(
        "speed,gain,acceptance",
        "With commas between them: speed (tokens per second), gain (speed over plain decoding), acceptance (tokens per "
        "forward).",
        metavar="FIGURE,...",
    )
    tolerance: float = option(0.0, "Share by which a figure may be worse.", low=0, high=1)

    def __post_init__(self) -> None:
        check_options(self, ConfigError)


@with_flags
def compare(
    old: Old,
    new: New,
    *,
    judged: Annotated[JudgedOptions, Flags()],
    json: options.Json = False,
) -> None:
    """Compare two results prompt by prompt. Exit code 1: something is worse beyond its interval."""
    from forerun.lab.bench import compare_results as paired
    from forerun.lab.bench.report.markdown import weaknesses
    from forerun.lab.bench.tables import Table, plain_table
    from forerun.lab.results.files import load_results

    figures = options.comma_list(judged.figures, "--figures")
    if odd := [name for name in figures if name not in paired.WHAT]:
        raise ConfigError(f"--figures has {odd[0]!r}, but may have {', '.join(paired.WHAT)}.")
    before = load_results(old)
    after = load_results(new)
    rows = paired.compare_results(before, after, figures, judged.tolerance)
    for name, each in (("old", before), ("new", after)):
        for text in weaknesses(each):
            say(f"{name}: {text}")
    for name in sorted({*before.settings, *after.settings}):
        was, now = (each.settings.get(name) or "none" for each in (before, after))
        if was != now:
            say(f"the two were measured with other settings: {name} was {was} and is {now}")
    if before.environment.machine != after.environment.machine:
        say("the two are of different machines: their times are shown, and not judged")
    counts = {name: sum(row.verdict == name for row in rows) for name in dict.fromkeys(row.verdict for row in rows)}
    if json:
        print_json({"worse": paired.WORSE in counts, "verdicts": counts, "rows": rows})
    else:
        table = Table.of("", paired.COLUMNS, rows)
        typer.echo(plain_table(table.header, table.rows))
        typer.echo("\n" + _conclusion(counts))
    if paired.WORSE in counts:
        raise typer.Exit(WORSE_EXIT)


def _conclusion(counts: dict[str, int]) -> str:
    from forerun.lab.bench import compare_results as paired

    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    if paired.WORSE in counts:
        return f"Worse: {listed}."
    if set(counts) <= {paired.BETTER, paired.SAME}:
        return f"Not worse: {listed}."
    return f"Inconclusive: {listed}. Nothing is shown to be worse; more prompts or rounds would narrow the intervals."
