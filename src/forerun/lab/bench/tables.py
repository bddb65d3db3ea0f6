"""The report of a bench command: tables with titles as text or Markdown, results for a file, and the machine."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from forerun.kernels.provenance import Environment, describe_environment
from forerun.lab.bench.measure import PADDED_NOTE, Interval
from forerun.lab.results.schema import DrafterFacts, Figure, PromptFacts, Results, RunRow, TableFacts, TargetFacts

Row = TypeVar("Row")
Columns: TypeAlias = Mapping[str, Callable[[Row], str]]
"""Title of a column -> function that returns a row's cell."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title and a header; all rows have as many cells as the header."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    @classmethod
    def of(cls, title: str, columns: Columns[Row], rows: Iterable[Row]) -> Table:
        """Make the table of measured rows."""
        return cls(title, list(columns), [[cell(row) for cell in columns.values()] for row in rows])


@dataclass(frozen=True, slots=True)
class Report:
    """The results of one command, as the schema of `forerun.results` has them, and as tables.

    Attributes:
        kind: what was measured.
        tables: the results for people, in this order.
        target, drafters, settings, prompts, rows, figures, details: as in `Results`.
    """

    kind: str
    tables: Sequence[Table]
    target: TargetFacts | None = None
    drafters: Sequence[DrafterFacts] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    prompts: Sequence[PromptFacts] = ()
    rows: Sequence[RunRow] = ()
    figures: Sequence[Figure] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def results(self, command: str, environment: Environment) -> Results:
        """Convert to the schema of results."""
        return Results(
            kind=self.kind,
            command=command,
            environment=environment,
            target=self.target,
            settings=self.settings,
            drafters=self.drafters,
            prompts=self.prompts,
            rows=self.rows,
            figures=self.figures,
            tables=[TableFacts(table.title, table.header, table.rows) for table in self.tables],
            details=self.details,
        )

    def text(self, environment: Environment, markdown: bool = False, width: int | None = None) -> str:
        """Format all tables, and the machine in one line. width: of the terminal."""
        parts = []
        if self.target is not None and self.target.cost_padded:
            parts.append(_filled(PADDED_NOTE, None if markdown else width))
        for table in self.tables:
            if markdown:
                parts.append(f"### {table.title}\n\n{markdown_table(table.header, table.rows)}")
            else:
                parts.append(f"{_filled(table.title, width)}\n{plain_table(table.header, table.rows, width)}")
        return "\n" + "\n\n".join([*parts, _filled(describe_environment(environment), width)])


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Pad columns to their widest cell; the first is aligned left, the others right.

    Where they are wider together than `width`, the columns follow in several tables, the first in each of them.
    """
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    groups: list[list[int]] = [[0]]
    for column in range(1, len(widths)):
        taken = sum(widths[other] + 2 for other in groups[-1])
        if width is not None and len(groups[-1]) > 1 and taken + widths[column] > width:
            groups.append([0])
        groups[-1].append(column)

    def line(cells: Sequence[str], group: Sequence[int]) -> str:
        padded = [cells[column].rjust(widths[column]) if column else cells[0].ljust(widths[0]) for column in group]
        return "  ".join(padded).rstrip()

    rules = ["-" * size for size in widths]
    tables = ["\n".join(line(cells, group) for cells in (header, rules, *rows)) for group in groups]
    return "\n\n".join(tables)


def _filled(text: str, width: int | None) -> str:
    return text if width is None else textwrap.fill(text, width)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table; the first column is aligned left, the others right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [header, rule, *rows]
    )


def percent(value: float | None) -> str:
    """Format a share as a percentage; a dash where there is none."""
    return "–" if value is None else f"{100 * value:.0f} %"


def decimal(value: float | Interval | None) -> str:
    """Format a number, or a median with its interval, with two decimals; a dash where there is none."""
    return "–" if value is None else f"{value:.2f}"
