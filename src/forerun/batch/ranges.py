"""A file of requests cut into ranges of bytes, each of whole lines, which workers read by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path

from forerun.batch.lines import Asked, BatchFile, asked_of
from forerun.errors import ConfigError

_PARTS = 8
"""Ranges for each worker: the last ones to end are then short beside the whole."""
_MOST_LINES = 512


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Some lines of a file.

    Attributes:
        first: index of the first of them, among the lines that are not blank.
        count: how many are not blank.
        start, end: bytes of the file.
        digest: of these bytes.
    """

    first: int
    count: int
    start: int
    end: int
    digest: str


def ranges_of(requests: BatchFile, num_workers: int) -> Iterator[ByteRange]:
    """The whole file in ranges of about as many requests each, several for each worker."""
    most = min(_MOST_LINES, -(-requests.num_lines // (num_workers * _PARTS)))
    first, count, start, end, content = 0, 0, 0, 0, sha256()
    for line in requests.raw():
        if count == most:
            yield ByteRange(first, count, start, end, content.hexdigest())
            first, count, start, content = first + count, 0, end, sha256()
        count += bool(line.strip())
        end += len(line)
        content.update(line)
    if count:
        yield ByteRange(first, count, start, end, content.hexdigest())


def requests_in(
    path: Path, part: ByteRange, wanted: Callable[[int], bool], model: str, context_length: int
) -> Iterator[Asked]:
    """The lines of a range whose index is wanted; arguments as `BatchFile.requests`.

    Raises:
        ConfigError: the file cannot be read here, or is another one.
    """
    try:
        with path.open("rb") as file:
            file.seek(part.start)
            content = file.read(part.end - part.start)
    except OSError as failure:
        raise ConfigError(
            f"{path} cannot be read by a worker: {failure.strerror}. The file must be there on every machine."
        ) from None
    if sha256(content).hexdigest() != part.digest:
        raise ConfigError(f"{path} holds other requests for a worker than for this command. Give all the same file.")
    index = part.first
    for line in BytesIO(content):  # with its line break, which errors depend on
        if line.strip():
            if wanted(index):
                yield asked_of(index, line, model, context_length)
            index += 1
