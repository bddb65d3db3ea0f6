"""Answers of the past in one file of a fixed size, which forgets the oldest.

    a page     a line of JSON: format, version, sizes, the tokenizer, a salt, a checksum of the line; padded with spaces
    segments   records, one after another: sequence number, tenant, number of tokens, a checksum; the tokens

A new record stands after the last one, or begins the next segment where there is no room: what that segment held, the
oldest of all, is forgotten before its first byte is written. Records of a segment have consecutive numbers, so that the
first that has another number or is damaged is its end: nothing but the record itself has to be written, and what a
killed process left half written is the next to be written over. The file has all its blocks from the beginning.

Nothing tells where a record is but the record: an answer is read with its number, tenant and checksum, or not at all.
Tokens are stored with the high byte first, as `rest.index` compares them.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from forerun.drafters.lookup.rest.index_file import token_bytes_for
from forerun.errors import ConfigError
from forerun.utils.files import REMEDY, Closing, atomic_file, digest, locked
from forerun.utils.json_file import Fields, open_regular

_FORMAT = "forerun-answers"
_VERSION = 1
_START = f'{{"format": "{_FORMAT}"'.encode()
_PAGE = 4096
NUM_SEGMENTS = 8
"""The part of the file that is forgotten at once is one of so many."""
_TENANT_BYTES = 16
_HEAD = struct.Struct(f"<4sQ{_TENANT_BYTES}sI")
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
        vocab_size: of the target that the file was made for; others of the tokenizer may have more or fewer.
        fingerprint: of the tokenizer; empty where there was none.
        salt: drawn for the file, in hexadecimal: with which tenants are hashed.
    """

    segment_bytes: int
    vocab_size: int
    fingerprint: str
    salt: str

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

    def hashed(self, tenant: str | None) -> bytes:
        """Return the hash of a tenant's name, or of having none, that stands in the file for it."""
        named = b"" if tenant is None else b"=" + tenant.encode("utf-8", "surrogatepass")
        return blake2b(named, digest_size=_TENANT_BYTES, key=self.salt.encode()).digest()

    def pieces(self, tokens: bytes) -> list[bytes]:
        """Cut an answer into what records hold: as much as a segment has room for."""
        width = self.token_bytes
        most = (self.segment_bytes - _HEAD_BYTES) // width * width
        return [tokens[first : first + most] for first in range(0, len(tokens), most)]

    def encode_record(self, number: int, tenant: bytes, tokens: bytes) -> bytes:
        """Return a record."""
        head = _HEAD.pack(_MARK, number, tenant, len(tokens) // self.token_bytes)
        return head + blake2b(head + tokens, digest_size=_SUM_BYTES).digest() + tokens


class AnswerFile(Closing):
    """The file, which this process alone has open. One thread writes; another may read meanwhile (`answers`).

    Args:
        path: the file; it is made if it is missing, for this user alone.
        num_bytes: that it takes; None: as many as it has, else `default_bytes`. A file of another size is written anew
            with the newest of its answers that fit.
        vocab_size, fingerprint: of the target's tokenizer.

    Attributes:
        number: of the next record; earlier ones have lower numbers.
        num_tokens: of all answers when it was opened.
        segments: tenants of the records of each, in the order in which they stand in the file; within a segment, those
            of the newest last.
        forgotten: tenants of whom something was forgotten; the caller empties it.

    Raises:
        ConfigError: the file cannot be made, read or written, is in use, is no such file, is of another version or of
            another tokenizer.
    """

    def __init__(
        self, path: Path, num_bytes: int | None, vocab_size: int, fingerprint: str, *, default_bytes: int
    ) -> None:
        self.path = path
        self.forgotten: set[bytes] = set()
        self._vocab_size = vocab_size
        self._segment = 0  # where the next record is to stand: `_scan`
        self._at = 0
        self._closing = ExitStack()
        try:
            with ExitStack() as opening:
                remedy = "Give each process a file of its own to remember, or end the other one."
                opening.enter_context(locked(path, ConfigError, wait=False, remedy=remedy))
                size = _segment_bytes(num_bytes or default_bytes)
                wanted = AnswerHeader(size, vocab_size, fingerprint, secrets.token_hex(16))
                if not os.path.lexists(path):
                    _make(path, wanted, ())
                self.header = _read_header(path, wanted)
                self._scan()
                if num_bytes is not None and self.header.segment_bytes != size:
                    answers = list(self.answers(self.tenants(), self.number))
                    self.header = replace(wanted, salt=self.header.salt)
                    _make(path, self.header, answers)
                    self._scan()
                self._file = opening.enter_context(path.open("r+b", buffering=0))
                self._closing = opening.pop_all()
        except ConfigError:
            raise
        except (OSError, ValueError) as failure:  # of a path that names no file, too
            reason = getattr(failure, "strerror", None) or failure
            raise ConfigError(f"remember {str(path)!r} cannot be used: {reason}. {REMEDY}") from None

    def tenants(self) -> list[bytes]:
        """Return all tenants of the file, those of the newest answers last."""
        found: dict[bytes, None] = {}
        for index in self._in_time():
            for tenant in self.segments[index]:
                found.pop(tenant, None)
                found[tenant] = None
        return list(found)

    def answers(self, tenants: Collection[bytes], end: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield tenant and tokens of answers, the oldest first.

        tenants: whose. end: the number of the first record that is left out.

        Raises:
            OSError: it cannot be read.
        """
        kind = f">u{self.header.token_bytes}"
        with self.path.open("rb") as file:
            for index in self._in_time():
                for number, tenant, tokens in self._records(file, index):
                    if number < end and tenant in tenants and np.frombuffer(tokens, kind).max() < self._vocab_size:
                        yield tenant, tokens

    def append(self, tenant: bytes, token_ids: NDArray[np.integer] | list[int]) -> None:
        """Write an answer after the others, in several records if it is longer than a segment.

        Raises:
            OSError: it cannot be written, or its end cannot.
        """
        for piece in self.header.pieces(np.asarray(token_ids, dtype=f">u{self.header.token_bytes}").tobytes()):
            record = self.header.encode_record(self.number, tenant, piece)
            if self._at + len(record) > self.header.segment_bytes:
                self._segment = (self._segment + 1) % NUM_SEGMENTS
                self._at = 0
                self.forgotten.update(self.segments[self._segment])
                self.segments[self._segment] = {}
            _write_at(self._file, record, _PAGE + self._segment * self.header.segment_bytes + self._at)
            self.number += 1
            self._at += len(record)
            held = self.segments[self._segment]
            held.pop(tenant, None)
            held[tenant] = None

    def close(self) -> None:
        """Close the file, and let other processes open it."""
        self._closing.close()

    def _in_time(self) -> list[int]:
        """Return the segments, that of the newest answers last."""
        return [(self._segment + step) % NUM_SEGMENTS for step in range(1, NUM_SEGMENTS + 1)]

    def _scan(self) -> None:
        """Find the sound records, and where the next one is to stand. Raises OSError."""
        self.segments: list[dict[bytes, None]] = []
        self.num_tokens = 0
        self.number = 1
        self._segment = 0
        self._at = 0
        with self.path.open("rb") as file:
            for index in range(NUM_SEGMENTS):
                held: dict[bytes, None] = {}
                at = 0
                for number, tenant, tokens in self._records(file, index):
                    held.pop(tenant, None)
                    held[tenant] = None
                    at += _HEAD_BYTES + len(tokens)
                    self.num_tokens += len(tokens) // self.header.token_bytes
                    if number >= self.number:
                        self.number = number + 1
                        self._segment = index
                        self._at = at
                self.segments.append(held)

    def _records(self, file: BinaryIO, index: int) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield number, tenant and tokens of the sound records of a segment, as long as numbers are consecutive."""
        file.seek(_PAGE + index * self.header.segment_bytes)
        data = file.read(self.header.segment_bytes)
        at = 0
        expected = None
        while at + _HEAD_BYTES <= len(data):
            mark, number, tenant, count = _HEAD.unpack_from(data, at)
            tokens_at = at + _HEAD_BYTES
            end = tokens_at + count * self.header.token_bytes
            if mark != _MARK or not tokens_at < end <= len(data) or expected not in (None, number):
                return
            tokens = data[tokens_at:end]
            if data[at:end] != self.header.encode_record(number, tenant, tokens):
                return
            yield number, tenant, tokens
            at = end
            expected = number + 1


def _segment_bytes(num_bytes: int) -> int:
    """Return the size of a segment, in whole pages, of a file of at most so many bytes."""
    return (num_bytes - _PAGE) // NUM_SEGMENTS // _PAGE * _PAGE


def _make(path: Path, header: AnswerHeader, answers: Iterable[tuple[bytes, bytes]]) -> None:
    """Write a new file, whole or not at all, with the newest of some answers that fit. Raises ConfigError."""
    pieces = ((tenant, piece) for tenant, tokens in answers for piece in header.pieces(tokens))
    segments = deque([bytearray()], NUM_SEGMENTS)
    for number, (tenant, piece) in enumerate(pieces, 1):
        record = header.encode_record(number, tenant, piece)
        if len(segments[-1]) + len(record) > header.segment_bytes:
            segments.append(bytearray())
        segments[-1] += record
    with atomic_file(path, ConfigError, mode=0o600) as file:
        file.write(header.encode())
        for segment in segments:
            file.write(segment.ljust(header.segment_bytes, b"\0"))
        left = header.num_bytes - file.tell()
        while left:
            left -= file.write(bytes(min(left, _AT_ONCE)))


def _read_header(path: Path, wanted: AnswerHeader) -> AnswerHeader:
    """Read the first page. Raises ConfigError if it is not that of such a file; OSError if it cannot be read."""
    with open_regular(path) as file:
        page = file.read(_PAGE)
        size = os.fstat(file.fileno()).st_size
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
        salt=values.string("salt"),
    )
    if page != header.encode() or size < header.num_bytes:
        raise ConfigError(f"remember {path} is damaged: its header is not as written, or it was cut short. {_REPLACE}")
    is_other = header.fingerprint != wanted.fingerprint or header.token_bytes != wanted.token_bytes
    if is_other or (not header.fingerprint and header.vocab_size != wanted.vocab_size):
        raise ConfigError(
            f"remember {path} holds answers of another tokenizer ({header.vocab_size:,} tokens, fingerprint "
            f"{header.fingerprint or 'empty'}), the target's has {wanted.vocab_size:,} tokens and "
            f"{wanted.fingerprint or 'none'}. {_REPLACE}"
        )
    return header


def _write_at(file: FileIO, content: bytes, at: int) -> None:
    """Write all of some bytes at an offset. Raises OSError."""
    file.seek(at)
    done = 0
    while done < len(content):
        done += file.write(content[done:])
