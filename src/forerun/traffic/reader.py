"""A journal read: its answers. A line that a crash has cut short is left out, and counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import ConfigError
from forerun.files.json_file import Fields
from forerun.traffic.records import FORMAT, REMEDY, Answer, Begun, answer_of, begun_of

_MOST_LINE = 1 << 22
"""Bytes of a line; a longer one is damage."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a journal tells.

    Attributes:
        begun: the last run that answered.
        answers: of all runs of its model, on its machine, in the order in which they ended.
        num_damaged: lines that could not be read.
        num_other: answers of runs with another model or machine, which are left out.
    """

    begun: Begun
    answers: list[Answer]
    num_damaged: int
    num_other: int


def is_journal(path: Path) -> bool:
    """Whether a file begins as journals do."""
    try:
        with path.open("rb") as file:
            return FORMAT.encode() in file.readline(1 << 16)
    except OSError:
        return False


def read_journal(path: Path) -> Traffic:
    """A journal, and the older part that lies beside it as FILE.1.

    Raises:
        ConfigError: it cannot be read, is no journal, or holds no answers.
    """
    older = path.with_name(path.name + ".1")
    held: list[tuple[Begun, Answer]] = []
    damaged = 0
    for part in ([older] if older.is_file() else []) + [path]:
        begun: Begun | None = None
        for number, content in enumerate(_lines(part)):
            try:
                found = Fields.parse(content, f"{part}, line {number + 1}", ConfigError, remedy=REMEDY)
                if "format" in found.values or begun is None:
                    begun = begun_of(found)
                else:
                    held.append((begun, answer_of(found)))
            except ConfigError:
                if begun is None:
                    raise
                damaged += 1
        if begun is None:
            raise ConfigError(f"{part}: it is empty. {REMEDY}")
    if not held:
        raise ConfigError(
            f"{path}: it holds no complete answers. Let the server answer some requests, or give another journal."
        )
    last = held[-1][0]
    answers = [answer for begun, answer in held if begun.setting == last.setting]
    return Traffic(last, answers, damaged, len(held) - len(answers))


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while content := file.readline(_MOST_LINE):
                yield content
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. {REMEDY}") from None
