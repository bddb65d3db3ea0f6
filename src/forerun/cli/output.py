"""Output and input shared by the commands: JSON, notes, sizes, the memory plan, and arguments that name files."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from forerun.config import MEMORY_LOG
from forerun.errors import ForerunError, PromptError
from forerun.integrations.versions import untried

if TYPE_CHECKING:
    from rich.progress import Progress

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


_SHOWN_AFTER, _LINE_EVERY = 2.0, 10.0
"""Seconds of reading a model after which a bar is drawn, and between two lines where there is no terminal."""


class LoadingProgress:
    """Shows how much of each model has been read (`progress_to`): by a bar on a terminal, else by lines.

    say: prints a line; a bar is drawn in place of `note` alone, since other programs of lines draw on the terminal too.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._draws = say is note and sys.stderr.isatty()
        self._name = ""
        self._since = 0.0
        self._bar: Progress | None = None

    def __call__(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if name != self._name:
            self._name = name
            self._since = now
        if self._draws:
            self._draw(done, total, waits=now < self._since + _SHOWN_AFTER)
        elif now >= self._since + _LINE_EVERY:
            self._since = now
            self._say(f"loading {name}: {size_text(done)} of {size_text(total)}")

    def _draw(self, done: int, total: int, *, waits: bool) -> None:
        if self._bar is None and not waits and done < total:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

            columns = BarColumn(), DownloadColumn(), TransferSpeedColumn()
            self._bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
            self._bar.start()
            self._bar.add_task("", total=total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, refresh=True)
            if done == total:
                self.close()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = None


class TimedProgress:
    """The progress of what has a time, on standard error: a bar on a terminal, else a line for each stage.

    seconds: for all of it; infinite where nothing limits it.
    """

    def __init__(self, title: str, seconds: float) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._seconds = seconds
        self._drawn = sys.stderr.isatty()
        columns = ("{task.description}", "{task.fields[count]}", "{task.fields[left]}")
        named, counted, left = map(TextColumn, columns)
        self._bar = Progress(
            *(named, BarColumn(), counted, left, TimeElapsedColumn()),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
            disable=not self._drawn,
        )
        self._task = self._bar.add_task(title, total=seconds if seconds < math.inf else None, count="", left="")

    def __enter__(self) -> TimedProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, text: str, more: str = "") -> None:
        """Show the name of a stage that begins. more: of it, which a bar shows by itself."""
        if not self._drawn:
            note(text + more)
        self._bar.start()  # not before: what is loaded has a bar of its own
        self._bar.update(self._task, description=text, count="", refresh=True)

    def tick(self, seconds: float, count: str = "") -> None:
        """Show how much of a stage is done, and the seconds that are left; called between trials, so that drawing slows
        none of them."""
        left = f"{max(self._seconds - seconds, 0):.0f} s left" if self._seconds < math.inf else ""
        done = min(seconds, self._seconds)
        self._bar.update(self._task, completed=done, count=count, left=left, refresh=True)


@contextmanager
def log_memory_plan(say: Callable[[str], None] | None) -> Iterator[None]:
    """Pass the memory plan, which `LLM` logs before it reads weights, to `say`, and show the progress of reading; None
    drops both."""
    from forerun.models.loading.weights import progress_to

    logger = logging.getLogger(MEMORY_LOG)
    level = logger.level

    def take(record: logging.LogRecord) -> bool:
        if say is not None:
            say(record.getMessage())
        return say is None  # other handlers would print it once more

    logger.addFilter(take)
    logger.setLevel(level if say is None else logging.INFO)
    shown = None if say is None else LoadingProgress(say)
    try:
        with nullcontext() if shown is None else progress_to(shown):
            yield
    finally:
        if shown is not None:
            shown.close()
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
