"""What every bench command prints: tables with titles as text or Markdown, or one JSON object; and the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from forerun.bench.measure import PADDED_NOTE, Interval, describe, is_cost_padded, machine

Row = TypeVar("Row")
Columns: TypeAlias = Mapping[str, Callable[[Row], str]]
"""By title of a column, what a measured row has in it."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title and a header; all rows have as many cells as the header."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    @classmethod
    def of(cls, title: str, columns: Columns[Row], rows: Iterable[Row]) -> Table:
        """The table of measured rows."""
        return cls(title, list(columns), [[cell(row) for cell in columns.values()] for row in rows])


@dataclass(frozen=True, slots=True)
class Report:
    """The results of one command.

    Attributes:
        facts: the settings and results for JSON.
        tables: the results for people, in this order.
        model: the model whose costs were measured; a note says so if it is cost-padded. None: no such note.
    """

    facts: dict[str, Any]
    tables: Sequence[Table]
    model: str | None = None

    def as_object(self) -> dict[str, Any]:
        """The facts and the machine."""
        return {**self.facts, "machine": machine()}

    def text(self, markdown: bool = False) -> str:
        """All tables, and the machine in one line."""
        parts = [PADDED_NOTE] if self.model is not None and is_cost_padded(self.model) else []
        for table in self.tables:
            title = f"### {table.title}\n" if markdown else table.title
            parts.append(f"{title}\n{(markdown_table if markdown else plain_table)(table.header, table.rows)}")
        return "\n" + "\n\n".join([*parts, describe(machine())])


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell; the first is aligned left, the others right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is aligned left, the others right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [header, rule, *rows]
    )


def percent(value: float | None) -> str:
    """A share as a percentage; a dash where there is none."""
    return "–" if value is None else f"{100 * value:.0f} %"


def decimal(value: float | Interval | None) -> str:
    """A number, or a median with its interval, with two decimals; a dash where there is none."""
    return "–" if value is None else f"{value:.2f}"
