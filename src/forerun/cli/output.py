"""Output and input shared by the commands: JSON, notes, sizes, the memory plan, and arguments that name files."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from forerun.config import MEMORY_LOG
from forerun.errors import ForerunError, PromptError
from forerun.integrations.versions import untried

if TYPE_CHECKING:
    from forerun.export.files import Exported


def print_json(report: object) -> None:
    """Print one JSON object on one line; dataclasses and named tuples become objects."""
    typer.echo(json.dumps(plain(report), ensure_ascii=False))


def plain(value: Any) -> Any:
    """Convert a value into dicts, lists, strings and numbers."""
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
    """Return the columns of standard output; None if it is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def show_written(out: Path, files: Exported, *, err: bool = False) -> None:
    """Print what an export has written."""
    size = f"{files.num_parameters:,} parameters in {files.dtype}, {files.nbytes:,} bytes in {len(files.files)} files"
    typer.echo(f"{out}: {size}", err=err)


def size_text(nbytes: float) -> str:
    """Format a size, in units of 1000."""
    for unit in ("bytes", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} GB"


@contextmanager
def log_memory_plan(say: Callable[[str], None] | None) -> Iterator[None]:
    """Pass the memory plan, which `LLM` logs before it reads weights, to `say`; None drops it."""
    logger = logging.getLogger(MEMORY_LOG)
    level = logger.level

    def take(record: logging.LogRecord) -> bool:
        if say is not None:
            say(record.getMessage())
        return say is None  # other handlers would print it once more

    logger.addFilter(take)
    logger.setLevel(level if say is None else logging.INFO)
    try:
        yield
    finally:
        logger.removeFilter(take)
        logger.setLevel(level)


def note(text: str) -> None:
    """Print a line on standard error."""
    typer.echo(f"forerun: {text}", err=True)


def note_untried(program: str) -> None:
    """Print a note if a program's version has not been tried with forerun. Raises ConfigError without the program."""
    if (warning := untried(program)) is not None:
        note(warning)


def unicode_text(text: str, what: str, error: type[ForerunError] = PromptError) -> str:
    """Return the text of an argument; raise `error` if it holds lone surrogates, as bytes that are not UTF-8 become."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise error(f"{what} is not UTF-8 text. Convert it first, or put it into a UTF-8 file.") from None
    return text


def text_or_file(value: str, flag: str, error: type[ForerunError] = PromptError) -> str:
    """Return the flag's text, or that of the file it names with @.

    Raises:
        error: the file cannot be read, or is not UTF-8.
    """
    if not unicode_text(value, flag, error).startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as failure:
        if isinstance(failure, UnicodeDecodeError):
            raise error(f"{flag} is {value!r}, but that file is not UTF-8 text: {failure}.") from None
        reason = getattr(failure, "strerror", None) or failure
        raise error(f"{flag} is {value!r}, but that file cannot be read: {reason}.") from None
