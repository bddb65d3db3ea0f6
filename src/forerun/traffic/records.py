"""What a journal holds: lines of JSON, each the beginning of a server's run, or an answer.

Times are in seconds. Nothing of a prompt or an answer is kept but its length; no id, key or address of who asked.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass

from forerun.errors import ConfigError
from forerun.files.json_file import Fields
from forerun.results.environment import Environment
from forerun.results.read import read_into

FORMAT = "forerun.journal"
VERSION = 2
CATEGORY = re.compile(r"[A-Za-z0-9_.-]{1,40}")
"""What a category may be: a word, not a text."""
MOST_CATEGORIES = 64
OTHER = "other"
"""The category of answers beyond MOST_CATEGORIES."""
REMEDY = "Give a file that `forerun serve --journal FILE` wrote."


@dataclass(frozen=True, slots=True)
class Begun:
    """The run of one server; written again at the head of each part of the file.

    Attributes:
        model: as requests call it.
        number_format: of its weights.
        environment: when it began, and where.
    """

    model: str
    number_format: str
    environment: Environment

    @property
    def setting(self) -> tuple[object, ...]:
        """All that runs must share to be compared."""
        at = self.environment
        return self.model, self.number_format, at.machine, at.threads, at.kernels


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice of one request, complete.

    Attributes:
        category: the client's word for it; empty without one.
        drafter: that it was to have; "none" for plain decoding.
        prompt, tokens: tokens of the prompt, and of the answer.
        forwards, drafted, accepted: as in SequenceStats.
        first: seconds to its first token, waiting included.
        seconds: to its end.
    """

    category: str
    drafter: str
    prompt: int
    tokens: int
    forwards: int
    drafted: int
    accepted: int
    first: float
    seconds: float


def line(record: Begun | Answer) -> bytes:
    """A line of the file."""
    head = {"format": FORMAT, "version": VERSION} if isinstance(record, Begun) else {}
    values = {**head, **dataclasses.asdict(record)}
    return json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def begun_of(found: Fields) -> Begun:
    """The beginning of a run, from its line. Raises ConfigError."""
    if found.values.get("format") != FORMAT:
        raise ConfigError(f"{found.place}: it is no journal of a server. {REMEDY}")
    version = found.integer("version", low=1)
    if version != VERSION:
        newer = "Update forerun." if version > VERSION else "Begin a new one."
        raise ConfigError(f"{found.place}: it is of version {version}, but this forerun reads {VERSION}. {newer}")
    return read_into(Begun, found)


def answer_of(found: Fields) -> Answer:
    """An answer, from its line. Raises ConfigError."""
    return read_into(Answer, found)
