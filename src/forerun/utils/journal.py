"""A journal of a long run's answers, each written when it is there, in a file beside OUT that outlives the process.

A line is a checksum, the index of the request and the answer as JSON; the first line has `run` for an index, and holds
what the answers depend on. A line that was cut short or damaged ends the journal: its answer and those of
later lines are computed again.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from forerun.errors import ConfigError
from forerun.utils.files import Closing, atomic_file, digest

_HEAD = "run"
_REMEDY = "Make room or permission there; the same command then goes on."


class Journal(Closing):
    """Answers by the index of their requests, on disk.

    Args:
        path: of the journal; it is made if it is missing.
        run: what the answers depend on, as JSON values: a journal is gone on with by the same run only.
        num_lines: how many requests there are at most.

    Attributes:
        path: of the journal.
        num_done: how many answers there are.

    Raises:
        ConfigError: it is another run's, or it cannot be read or written.
    """

    def __init__(self, path: Path, run: Mapping[str, Any], num_lines: int) -> None:
        self.path = path
        self.num_done = 0
        self._offsets = array("q", [-1]) * num_lines
        try:
            self._file: BinaryIO = path.open("r+b" if path.exists() else "w+b")
        except OSError as failure:
            raise ConfigError(f"{path} cannot be written: {failure.strerror}. {_REMEDY}") from None
        try:
            self._read(run)
        except OSError as failure:
            self.close()
            raise ConfigError(f"{path} cannot be read: {failure.strerror}. {_REMEDY}") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def has(self, index: int) -> bool:
        """Return whether the answer to this request is there."""
        return self._offsets[index] >= 0

    def add(self, index: int, answer: Mapping[str, Any]) -> None:
        """Append an answer. A kill of the process leaves it whole. Raises ConfigError if it cannot be written."""
        line = _line(str(index), answer)
        self._keep(index, self._append(line), line)

    def write_out(self, out: Path) -> None:
        """Write all answers in the order of their requests, as a whole. Raises ConfigError if it cannot be done."""
        with atomic_file(out, ConfigError, remedy=_REMEDY) as file:
            for index in range(len(self._offsets)):
                file.write(self._content(index) + b"\n")

    def get(self, index: int) -> dict[str, Any]:
        """Return an answer that is there. Raises ConfigError if it was damaged meanwhile."""
        answer: dict[str, Any] = json.loads(self._content(index))
        return answer

    def remove(self) -> None:
        """Delete the journal's file."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _content(self, index: int) -> bytes:
        self._file.seek(self._offsets[index])
        found = _parsed(self._file.readline())
        if found is None or found[0] != str(index):
            raise ConfigError(f"{self.path} was damaged while it was in use. Give --force to begin anew.")
        return found[1]

    def _keep(self, index: int, place: int, line: bytes) -> None:
        self.num_done += not self.has(index)
        self._offsets[index] = place

    def _append(self, line: bytes) -> int:
        """Append a line, and return its position."""
        try:
            offset = self._file.seek(0, os.SEEK_END)
            self._file.write(line)
            self._file.flush()
        except OSError as failure:
            raise ConfigError(f"{self.path} cannot be written: {failure.strerror}. {_REMEDY}") from None
        return offset

    def _read(self, run: Mapping[str, Any]) -> None:
        head = _parsed(self._file.readline())
        if head is None:
            if self._file.seek(0, os.SEEK_END) and not self._begun_by_this(run):
                raise ConfigError(f"{self.path} is no journal. Give another OUT, or --force to begin anew.")
            self._file.truncate(0)
            self._append(_line(_HEAD, run))
            return
        self._check_run(json.loads(head[1]), run)
        end = self._file.tell()
        for line in self._file:
            found = _parsed(line)
            if found is None or not found[0].isdecimal() or int(found[0]) >= len(self._offsets):
                break
            self._keep(int(found[0]), end, line)
            end += len(line)
        self._file.truncate(end)

    def _check_run(self, former: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        run = json.loads(json.dumps(run))
        changed = [key for key in {**run, **former} if former.get(key) != run.get(key)]
        if changed:
            changes = ", ".join(f"{key} was {former.get(key)!s:.80} and is {run.get(key)!s:.80}" for key in changed)
            raise ConfigError(
                f"{self.path} holds the answers of a run that differs: {changes}. Give the same file and options to "
                "continue it, another OUT, or --force to begin anew."
            )

    def _begun_by_this(self, run: Mapping[str, Any]) -> bool:
        """Return whether the file is the beginning of this run's first line, cut short by a kill."""
        self._file.seek(0)
        line = _line(_HEAD, run)
        return line.startswith(self._file.read(len(line) + 1))


def _line(name: str, value: Mapping[str, Any]) -> bytes:
    content = f"{name} {json.dumps(value, ensure_ascii=False, allow_nan=False)}".encode()
    return digest(content).encode() + b" " + content + b"\n"


def _parsed(line: bytes) -> tuple[str, bytes] | None:
    """Parse a line into (name, JSON); None if the line is damaged."""
    checksum, _, content = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or digest(content).encode() != checksum:
        return None
    name, _, value = content.partition(b" ")
    return name.decode(), value
