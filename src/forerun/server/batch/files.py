"""Files of a batch: the answers, their journal, and ranges of the requests for workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path

from forerun.errors import ConfigError
from forerun.server.batch.lines import BatchFile, BatchLine, broken_path, parse_line
from forerun.utils import journal
from forerun.utils.files import locked, refuse_to_overwrite


@contextmanager
def locked_journal(source: Path, out: Path, *, force: bool) -> Iterator[Path]:
    """Lock OUT against other processes and yield the path of its journal.

    Args:
        source: the requests.
        force: start again, and replace OUT.

    Raises:
        ConfigError: OUT exists without the journal of an unfinished run; OUT, or a file beside it that a run writes
            too, is the source; another process writes OUT.
    """
    journal = out.with_name(f"{out.name}.journal")
    for path in (out, journal, broken_path(out)):
        if path.exists() and path.samefile(source):
            raise ConfigError(
                f"{path} holds the requests themselves, but would be written or removed for the answers in {out}. Give "
                "another file for the answers."
            )
    if out.is_dir():
        raise ConfigError(f"{out} is a folder. Give a file for the answers.")
    with locked(out, ConfigError, wait=False, remedy="Wait until that run ends, or give another OUT."):
        if force:
            journal.unlink(missing_ok=True)
        elif not journal.exists():
            refuse_to_overwrite(out, ConfigError)
        yield journal


_SERVED = b'"response": {"status_code": 200,'
"""In the JSON of an answer that is no error, and of no other: inside a string, its quotes would be escaped."""


class BatchJournal(journal.Journal):
    """The journal of a batch, which counts the answers that are errors.

    Attributes:
        num_errors: number of errors.
    """

    num_errors = 0

    def _keep(self, index: int, place: int, line: bytes) -> None:
        self.num_errors += not self.has(index) and _SERVED not in line
        super()._keep(index, place, line)


_PARTS = 8
"""Ranges per worker: several, so that all workers end at about the same time."""
_MOST_LINES = 512


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A range of bytes of a file that holds whole lines.

    Attributes:
        first: index of its first line, among the lines that are not blank.
        count: lines that are not blank.
        start, end: byte offsets.
        digest: of these bytes.
    """

    first: int
    count: int
    start: int
    end: int
    digest: str


def ranges_of(requests: BatchFile, num_workers: int) -> Iterator[ByteRange]:
    """Split the file into ranges of about the same number of requests, several for each worker."""
    most = min(_MOST_LINES, -(-requests.num_lines // (num_workers * _PARTS)))
    first = 0
    count = 0
    start = 0
    end = 0
    content = sha256()
    for line in requests.raw():
        if count == most:
            yield ByteRange(first, count, start, end, content.hexdigest())
            first = first + count
            count = 0
            start = end
            content = sha256()
        count += bool(line.strip())
        end += len(line)
        content.update(line)
    if count:
        yield ByteRange(first, count, start, end, content.hexdigest())


def requests_in(
    path: Path, part: ByteRange, selected: Callable[[int], bool], model: str, context_length: int
) -> Iterator[BatchLine]:
    """Yield the lines of a range whose index is selected; arguments as `BatchFile.requests`.

    Raises:
        ConfigError: the file cannot be read here, or has another content.
    """
    try:
        with path.open("rb") as file:
            file.seek(part.start)
            content = file.read(part.end - part.start)
    except OSError as failure:
        raise ConfigError(
            f"{path} cannot be read by a worker: {failure.strerror}. The file must exist on every machine."
        ) from None
    if sha256(content).hexdigest() != part.digest:
        raise ConfigError(f"{path} holds other requests for a worker than for this command. Give all the same file.")
    index = part.first
    for line in BytesIO(content):  # with its line break, which errors depend on
        if line.strip():
            if selected(index):
                yield parse_line(index, line, model, context_length)
            index += 1
