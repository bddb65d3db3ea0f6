"""What the commands print for programs, and how wide what they print for people may be."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from forerun.export.files import Exported


def print_json(report: object) -> None:
    """One object on one line of standard output; dataclasses and named tuples become objects."""
    typer.echo(json.dumps(plain(report), ensure_ascii=False))


def plain(value: Any) -> Any:
    """The value in dicts, lists, strings and numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value


def terminal_width() -> int | None:
    """Columns of standard output; None where it is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def tell_written(out: Path, files: Exported, *, err: bool = False) -> None:
    """What an export has written."""
    size = f"{files.num_parameters:,} parameters in {files.dtype}, {files.nbytes:,} bytes in {len(files.files)} files"
    typer.echo(f"{out}: {size}", err=err)


def size_text(nbytes: float) -> str:
    """A size for people, in units of 1000."""
    for unit in ("bytes", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} GB"
