"""What the commands print for programs, and how wide what they print for people may be."""

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


# What commands say on standard error: notes, and the plan of memory, which `LLM` logs before weights are read.


class _ProgressLine(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.getMessage())


@contextmanager
def log_memory_plan(say: Callable[[str], None] | None) -> Iterator[None]:
    """Within this, a plan is said. say: gets the line; None: nothing is said."""
    logger = logging.getLogger(MEMORY_LOG)
    level, propagate = logger.level, logger.propagate
    if say is None:
        yield
        return
    line = _ProgressLine(say)
    logger.addHandler(line)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # a program's handlers would say it once more
    try:
        yield
    finally:
        logger.removeHandler(line)
        logger.setLevel(level)
        logger.propagate = propagate


def note(text: str) -> None:
    """A line on standard error, by forerun."""
    typer.echo(f"forerun: {text}", err=True)


def note_untried(program: str) -> None:
    """A note where a program's version has not been tried with forerun. Raises ConfigError where it is not there."""
    said = untried(program)
    if said is not None:
        note(said)


# Texts that a command line gives as they are or by the name of a file.


def unicode_text(text: str, what: str, error: type[ForerunError] = PromptError) -> str:
    """The text of an argument. Python reads bytes that are not UTF-8 as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise error(f"{what} is not UTF-8 text. Convert it first, or put it into a UTF-8 file.") from None
    return text


def text_or_file(value: str, flag: str, error: type[ForerunError] = PromptError) -> str:
    """The flag's text, or that of the file it names with @.

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
