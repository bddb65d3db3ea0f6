"""Format and writer of a server's journal: lines of JSON, each the head of a run, or an answer.

Times are in seconds. Of prompts and answers only the lengths are kept; no id, key or address of the client.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from forerun.errors import ConfigError
from forerun.kernels.provenance import Environment
from forerun.utils.files import locked
from forerun.utils.json_file import Fields

FORMAT = "forerun.journal"
VERSION = 2
CATEGORY = re.compile(r"[A-Za-z0-9_.-]{1,40}")
"""Valid categories: a word, not a text."""
MOST_CATEGORIES = 64
OTHER = "other"
"""The category of answers beyond MOST_CATEGORIES."""
REMEDY = "Give a file that `forerun serve --journal FILE` wrote."


@dataclass(frozen=True, slots=True)
class ServerRunRecord:
    """The run of one server; repeated at the head of each part of the file.

    Attributes:
        model: its name in requests.
        number_format: of its weights.
        environment: time of the start, machine and software.
    """

    model: str
    number_format: str
    environment: Environment

    @property
    def setting(self) -> tuple[object, ...]:
        """Return all that runs must share to be comparable."""
        at = self.environment
        return self.model, self.number_format, at.machine, at.threads, at.kernels


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """One choice of one request, complete.

    Attributes:
        category: given by the client; empty without one.
        drafter: name of its drafter; "none" for plain decoding.
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


def line(record: ServerRunRecord | AnswerRecord) -> bytes:
    """Return the line of a record."""
    head = {"format": FORMAT, "version": VERSION} if isinstance(record, ServerRunRecord) else {}
    values = {**head, **dataclasses.asdict(record)}
    return json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def check_head(found: Fields) -> None:
    """Raise ConfigError unless this line is the head of a run in this version of the format."""
    if found.values.get("format") != FORMAT:
        raise ConfigError(f"{found.place}: it is no journal of a server. {REMEDY}")
    version = found.integer("version", low=1)
    if version != VERSION:
        newer = "Update forerun." if version > VERSION else "Begin a new one."
        raise ConfigError(f"{found.place}: it is of version {version}, but this forerun reads {VERSION}. {newer}")
    found.string("model")


# A thread of its own writes the records to disk. The file never exceeds its bound: when half of the bound is used, it
# replaces FILE.1, and a new one is run. If the disk fails, the server continues without the journal and logs it once.

INTERVAL = 2.0
"""Seconds between two writes."""
MOST_PENDING = 1000
"""Answers that wait for the disk; more are left out, and counted."""
_log = logging.getLogger("forerun.traffic")


class Recorder:
    """Writes a journal. All methods may be called from any thread, and none waits for the disk.

    Args:
        path: of the journal; an existing one is continued.
        bound: maximum bytes of FILE and FILE.1 together.
        run: the head of this run.

    Attributes:
        failed: nothing is written any more.
        lost: answers that were left out, because the disk was too slow or full; `close` logs how many.

    Raises:
        ConfigError: the file is something else, is in use, or cannot be written.
    """

    def __init__(self, path: Path, bound: int, run: ServerRunRecord) -> None:
        self.failed = False
        self.lost = 0
        self._path = path
        self._bound = bound
        self._head = line(run)
        self._pending: list[AnswerRecord] = []
        self._categories: set[str] = set()
        self._changed = threading.Lock()
        self._closing = threading.Event()
        self._held = ExitStack()
        check_journal_path(path)
        self._held.enter_context(locked(path, ConfigError, wait=False, remedy="Give each server its own --journal."))
        try:
            self._file: BinaryIO = path.open("ab")
        except OSError as error:
            self._held.close()
            raise ConfigError(f"--journal is {path}, which cannot be written: {error.strerror}.") from None
        size = self._file.tell()
        self._put((b"\n" if size and not _ends_whole(self._path) else b"") + self._head)
        self._thread = threading.Thread(target=self._run, name="forerun-journal", daemon=True)
        self._thread.start()

    def answer(self, answer: AnswerRecord) -> None:
        """Queue the record of an answer."""
        with self._changed:
            if self.failed or len(self._pending) >= MOST_PENDING:
                self.lost += 1
                return
            self._categories |= {answer.category} if len(self._categories) < MOST_CATEGORIES else set()
            if answer.category and answer.category not in self._categories:
                answer = replace(answer, category=OTHER)
            self._pending.append(answer)

    def close(self) -> None:
        """Write pending records and close the file."""
        self._closing.set()
        self._thread.join()
        self._write()
        if self.lost:
            _log.warning({"event": "journal incomplete", "answers left out": self.lost, "journal": str(self._path)})
        with self._held, suppress(OSError):  # of what a full disk has not taken, which was told
            self._file.close()

    def _run(self) -> None:
        while not self._closing.wait(INTERVAL):
            self._write()

    def _write(self) -> None:
        with self._changed:
            answers = self._pending
            self._pending = []
        if answers:
            self._put(b"".join(map(line, answers)))

    def _put(self, content: bytes) -> None:
        """Append; begin a new file if half of the bound is used."""
        if self.failed:
            return
        try:
            if self._file.tell() and self._file.tell() + len(content) > self._bound // 2:
                self._file.close()
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                self._file = self._path.open("ab")
                self._file.write(self._head)
            self._file.write(content)
            self._file.flush()
        except OSError as error:
            self.failed = True
            _log.warning({"event": "journal failed", "reason": error.strerror or type(error).__name__})


def check_journal_path(path: Path) -> None:
    """Raise ConfigError if a journal cannot be written to a path, or the file is something else."""
    if path.is_dir() or not path.parent.is_dir():
        reason = "is a folder" if path.is_dir() else f"lies in {path.parent}, which is no folder"
        raise ConfigError(f"--journal is {path}, which {reason}. Give the name of a file.")
    try:
        with path.open("rb") as file:
            head = file.readline(1 << 16)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"--journal is {path}, which cannot be read: {error.strerror}. Give another name.") from None
    if head:
        check_head(Fields.parse(head, str(path), ConfigError, remedy="Give another --journal."))


def _ends_whole(path: Path) -> bool:
    """Return whether the last line is complete."""
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
