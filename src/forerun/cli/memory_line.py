"""What commands say on standard error: notes, and the plan of memory, which `LLM` logs before weights are read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from forerun.config import MEMORY_LOG
from forerun.integrations.tried import untried


class _Line(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.getMessage())


@contextmanager
def memory_told(say: Callable[[str], None] | None) -> Iterator[None]:
    """Within this, a plan is said. say: gets the line; None: nothing is said."""
    logger = logging.getLogger(MEMORY_LOG)
    level, propagate = logger.level, logger.propagate
    if say is None:
        yield
        return
    line = _Line(say)
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
