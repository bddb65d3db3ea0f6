"""Measured rows as a CSV file, for spreadsheets and plots: one line per row, one column per figure."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.bench.measure import Interval
from forerun.errors import ConfigError
from forerun.files.write import write_bytes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def write_rows(path: Path, rows: Mapping[str, Sequence[DataclassInstance]]) -> None:
    """Write rows of one kind. rows: by what was measured, which is the first column.

    Raises:
        ConfigError: the file cannot be written; nothing is left of it then.
    """
    lines = [{"measured": name, **_flat(row)} for name, each in rows.items() for row in each]
    columns = dict.fromkeys(column for line in lines for column in line)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns))
    writer.writeheader()
    writer.writerows(lines)
    write_bytes(path, text.getvalue().encode(), error=ConfigError)


def _flat(row: DataclassInstance) -> dict[str, Any]:
    """A row's fields: an interval as three columns, a list as numbered ones."""
    cells: dict[str, Any] = {}
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if isinstance(value, Interval):
            cells |= {field.name: value.median, f"{field.name}_low": value.low, f"{field.name}_high": value.high}
        elif isinstance(value, (list, tuple)):
            cells |= {f"{field.name}_{place}": each for place, each in enumerate(value, 1)}
        else:
            cells[field.name] = value
    return cells
