"""Answers of the past in one file of a fixed size, which forgets the oldest.

    a page     a line of JSON: format, version, sizes, the tokenizer, a checksum of the line; padded with spaces
    segments   records, one after another: sequence number, tenant, number of tokens, a checksum; the tokens

A new record stands after the last one, or begins the next segment where there is no room: what that segment held, the
oldest of all, is forgotten. Records of a segment have consecutive numbers, so that the first that has another number or
is damaged is its end: nothing but the record itself has to be written, and what a killed process left half written is
the next to be written over. The file has all its blocks from the beginning, is read through a map and written without:
a full disk is an error when it is made, never a signal later.

Tokens are stored with the high byte first, as `rest.index` compares them.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from hashlib import blake2b
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forerun.drafters.lookup.rest.index_file import token_bytes_for
from forerun.errors import ConfigError
from forerun.utils.files import REMEDY, Closing, atomic_file, digest, locked
from forerun.utils.json_file import Fields, open_regular

_log = logging.getLogger(__name__)
_FORMAT = "forerun-answers"
_VERSION = 1
_START = f'{{"format": "{_FORMAT}"'.encode()
_PAGE = 4096
NUM_SEGMENTS = 8
"""The part of the file that is forgotten at once is one of so many."""
LEAST_BYTES = _PAGE * (1 + NUM_SEGMENTS)
TENANT_BYTES = 16
_HEAD = struct.Struct(f"<4sQ{TENANT_BYTES}sI")
_MARK = b"frA1"
_SUM_BYTES = 16
_HEAD_BYTES = _HEAD.size + _SUM_BYTES
_AT_ONCE = 1 << 20
"""Bytes of zeros that are written at once into a new file."""
_REPLACE = "Give another file to remember, or remove this one."


@dataclass(frozen=True, slots=True)
class AnswerHeader:
    """The description of a file.

    Attributes:
        segment_bytes: of each of the NUM_SEGMENTS segments.
        vocab_size: every token is below it.
        fingerprint: of the tokenizer; empty where there was none.
    """

    segment_bytes: int
    vocab_size: int
    fingerprint: str

    @property
    def token_bytes(self) -> int:
        """Return the bytes of a token."""
        return token_bytes_for(self.vocab_size)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the file."""
        return _PAGE + NUM_SEGMENTS * self.segment_bytes

    def encode(self) -> bytes:
        """Return the first page of the file."""
        values = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        values["checksum"] = digest(json.dumps(values).encode())
        return json.dumps(values).encode().ljust(_PAGE - 1) + b"\n"


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """Where a record's tokens are.

    Attributes:
        number: the sequence number; later ones are higher.
        tenant: the hash of its name.
        start, end: offsets of its tokens in the file.
    """

    number: int
    tenant: bytes
    start: int
    end: int


class AnswerFile(Closing):
    """The file, which this process alone has open. One thread at a time may use it.

    Args:
        path: the file; it is made if it is missing, for this user alone.
        num_bytes: that it takes; None: as many as it has, else `default_bytes`. A file of another size is written anew
            with the newest of its answers that fit.
        vocab_size, fingerprint: of the target's tokenizer.

    Attributes:
        stored: the answers of each segment, the oldest segment and answer first.

    Raises:
        ConfigError: the file cannot be made, read or written, is in use, is no such file, is of another version or of
            another tokenizer; `num_bytes` is too small.
    """

    def __init__(
        self, path: Path, num_bytes: int | None, vocab_size: int, fingerprint: str, *, default_bytes: int
    ) -> None:
        if num_bytes is not None and num_bytes < LEAST_BYTES:
            raise ConfigError(f"remember_size is {num_bytes:,} bytes, but at least {LEAST_BYTES:,} are needed.")
        self.path = path
        self._closing = ExitStack()
        try:
            with ExitStack() as opening:
                remedy = "Give each process a file of its own to remember, or end the other one."
                opening.enter_context(locked(path, ConfigError, wait=False, remedy=remedy))
                wanted = AnswerHeader(_segment_bytes(num_bytes or default_bytes), vocab_size, fingerprint)
                if not os.path.lexists(path):
                    _make(path, wanted, ())
                self.header = _read_header(path, wanted)
                if num_bytes is not None and self.header.segment_bytes != wanted.segment_bytes:
                    self._resize(path, wanted)
                self._open(opening)
                self._closing = opening.pop_all()
        except OSError as failure:
            raise ConfigError(f"remember {path} cannot be used: {failure.strerror or failure}. {REMEDY}") from None
        self.stored, self._number, self._at = _scan(self._map, self.header)

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all answers."""
        width = self.header.token_bytes
        return sum((each.end - each.start) // width for segment in self.stored for each in segment)

    @property
    def is_whole(self) -> bool:
        """Return whether the file has its size still: reading a map beyond a file's end would end the process."""
        return not self._file.closed and os.fstat(self._file.fileno()).st_size >= self.header.num_bytes

    def append(self, tenant: bytes, token_ids: NDArray[np.integer] | list[int]) -> list[StoredAnswer]:
        """Write an answer after the others, in several records if it is longer than a segment.

        Returns:
            The answers that were forgotten for it.

        Raises:
            OSError: it cannot be written; nothing has changed then.
        """
        tokens = np.asarray(token_ids, dtype=f">u{self.header.token_bytes}")
        most = (self.header.segment_bytes - _HEAD_BYTES) // self.header.token_bytes
        forgotten: list[StoredAnswer] = []
        for first in range(0, len(tokens), most):
            forgotten += self._append(tenant, tokens[first : first + most].tobytes())
        return forgotten

    def tokens(self, stored: StoredAnswer) -> bytes:
        """Return the tokens of an answer, the high byte first. `is_whole` comes before."""
        return self._map[stored.start : stored.end]

    def close(self) -> None:
        """Close the file, and let other processes open it."""
        self._closing.close()

    def _append(self, tenant: bytes, tokens: bytes) -> list[StoredAnswer]:
        """Write one record, and return what was forgotten for it."""
        segment_bytes = self.header.segment_bytes
        record = _encode_record(self._number, tenant, tokens, self.header.token_bytes)
        at = self._at
        in_segment = (at - _PAGE) % segment_bytes
        turns = bool(self.stored[-1]) and (in_segment == 0 or in_segment + len(record) > segment_bytes)
        if turns:
            segment = (self._at - 1 - _PAGE) // segment_bytes
            at = _PAGE + (segment + 1) % NUM_SEGMENTS * segment_bytes
        _write_at(self._file, record, at)
        forgotten: list[StoredAnswer] = []
        if turns:
            if len(self.stored) == NUM_SEGMENTS:
                forgotten = self.stored.popleft()
            self.stored.append([])
        self.stored[-1].append(StoredAnswer(self._number, tenant, at + _HEAD_BYTES, at + len(record)))
        self._number += 1
        self._at = at + len(record)
        return forgotten

    def _open(self, opening: ExitStack) -> None:
        """Open and map the file."""
        self._file = opening.enter_context(self.path.open("r+b", buffering=0))
        self._map = opening.enter_context(
            mmap.mmap(self._file.fileno(), self.header.num_bytes, access=mmap.ACCESS_READ)
        )

    def _resize(self, path: Path, wanted: AnswerHeader) -> None:
        """Write the file anew in another size."""
        with ExitStack() as reading:
            self._open(reading)
            stored, _, _ = _scan(self._map, self.header)
            answers = [(each.tenant, self.tokens(each)) for segment in stored for each in segment]
        _make(path, wanted, answers)
        self.header = wanted


def _segment_bytes(num_bytes: int) -> int:
    """Return the size of a segment, in whole pages, of a file of at most so many bytes."""
    return (num_bytes - _PAGE) // NUM_SEGMENTS // _PAGE * _PAGE


def _make(path: Path, header: AnswerHeader, answers: Iterable[tuple[bytes, bytes]]) -> None:
    """Write a new file, whole or not at all, with the newest of some answers that fit. Raises ConfigError."""
    width = header.token_bytes
    most = (header.segment_bytes - _HEAD_BYTES) // width * width
    records = [
        (tenant, tokens[first : first + most]) for tenant, tokens in answers for first in range(0, len(tokens), most)
    ]
    segments: deque[list[bytes]] = deque([[]], NUM_SEGMENTS)
    for number, (tenant, tokens) in enumerate(records, 1):
        record = _encode_record(number, tenant, tokens, width)
        if sum(map(len, segments[-1])) + len(record) > header.segment_bytes:
            segments.append([])
        segments[-1].append(record)
    with atomic_file(path, ConfigError, mode=0o600) as file:
        file.write(header.encode())
        for segment in segments:
            file.write(b"".join(segment).ljust(header.segment_bytes, b"\0"))
        left = header.num_bytes - file.tell()
        while left:
            left -= file.write(bytes(min(left, _AT_ONCE)))


def _read_header(path: Path, wanted: AnswerHeader) -> AnswerHeader:
    """Read the first page. Raises ConfigError if it is not that of such a file; OSError if it cannot be read."""
    try:
        with open_regular(path) as file:
            page = file.read(_PAGE)
            size = os.fstat(file.fileno()).st_size
    except ValueError as error:
        raise ConfigError(f"remember {path} cannot be used: {error}. {_REPLACE}") from None
    if not page.startswith(_START):
        raise ConfigError(f"remember {path} is no file of answers (its first bytes are {page[:16]!r}). {_REPLACE}")
    values = Fields.parse(page, f"remember {path} is damaged: its first line", ConfigError, remedy=_REPLACE)
    if (version := values.values.get("version")) != _VERSION:
        raise ConfigError(
            f"remember {path} is of version {str(version)[:20]}, but this forerun writes version {_VERSION}. {_REPLACE}"
        )
    header = AnswerHeader(
        segment_bytes=values.integer("segment_bytes", low=_PAGE),
        vocab_size=values.integer("vocab_size", low=1),
        fingerprint=values.string("fingerprint"),
    )
    if page != header.encode() or size < header.num_bytes:
        raise ConfigError(f"remember {path} is damaged: its header is not as written, or it was cut short. {_REPLACE}")
    if (header.fingerprint, header.vocab_size) != (wanted.fingerprint, wanted.vocab_size):
        raise ConfigError(
            f"remember {path} holds answers of another tokenizer ({header.vocab_size:,} tokens, fingerprint "
            f"{header.fingerprint or 'empty'}), the target's has {wanted.vocab_size:,} tokens and "
            f"{wanted.fingerprint or 'none'}. {_REPLACE}"
        )
    return header


def _encode_record(number: int, tenant: bytes, tokens: bytes, width: int) -> bytes:
    head = _HEAD.pack(_MARK, number, tenant, len(tokens) // width)
    return head + blake2b(head + tokens, digest_size=_SUM_BYTES).digest() + tokens


def _write_at(file: FileIO, content: bytes, at: int) -> None:
    """Write all of some bytes at an offset. Raises OSError."""
    file.seek(at)
    done = 0
    while done < len(content):
        done += file.write(content[done:])


def _scan(data: mmap.mmap, header: AnswerHeader) -> tuple[deque[list[StoredAnswer]], int, int]:
    """Return the sound answers by segment, the oldest segment first; and the number and the offset of the next."""
    found = []
    for index in range(NUM_SEGMENTS):
        start = _PAGE + index * header.segment_bytes
        if segment := list(_records(data, start, start + header.segment_bytes, header.token_bytes)):
            found.append(segment)
    if not found:
        return deque([[]]), 1, _PAGE
    found.sort(key=lambda segment: segment[0].number)
    last = found[-1][-1]
    return deque(found), last.number + 1, last.end


def _records(data: mmap.mmap, at: int, end: int, width: int) -> Iterator[StoredAnswer]:
    """Yield the sound records from an offset on, as long as their numbers are consecutive."""
    number = None
    while at + _HEAD_BYTES <= end:
        head = data[at : at + _HEAD.size]
        mark, own, tenant, count = _HEAD.unpack(head)
        start = at + _HEAD_BYTES
        at = start + count * width
        if mark != _MARK or at > end or number not in (None, own):
            return
        checksum = data[start - _SUM_BYTES : start]
        if checksum != blake2b(head + data[start:at], digest_size=_SUM_BYTES).digest():
            return
        yield StoredAnswer(own, tenant, start, at)
        number = own + 1
