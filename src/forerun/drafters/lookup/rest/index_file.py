"""The index as one file: a line of JSON, the tokens, the suffix array (not in a compact one). Read or mapped, never
unpickled.

Tokens are stored with the high byte first: then comparing bytes compares tokens, and a binary search needs no more than
slices of the map. Every document is followed by the end marker, the largest number of the type, which no token is.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.errors import ConfigError
from forerun.utils.files import digest, file_digest, write_bytes
from forerun.utils.json_file import Fields, open_regular

# The suffix array is sorted by prefix doubling (Manber and Myers, 1993) in whole-array operations: where the first h
# tokens are ranked, one sort ranks up to 2 h. It is sorted only as deep as retrieval reads, since repeated files make
# full sorting slow.
MAX_TOKENS = 2**32 - 2


def sort_suffixes(
    tokens: NDArray[Any], depth: int, tick: Callable[[float], None] = lambda share: None
) -> NDArray[np.uint32]:
    """Sort every position by the `depth` tokens from there on.

    Args:
        tokens: [n].
        depth: tokens that are compared; where the corpus ends sooner, the shorter comes first. Equal ones stay in
            the order of their positions.
        tick: receives the share of the work that is done.

    Returns:
        [n] uint32.

    Raises:
        ConfigError: more tokens than 32 bits can count, or a depth below 1.
    """
    check_sortable(len(tokens), depth)
    if len(tokens) == 0:
        return np.zeros(0, dtype=np.uint32)
    keys, sorted_depth = _first_keys(tokens, depth)
    # the depth doubles each time
    num_sorts = 1 + (-(-depth // sorted_depth) - 1).bit_length()
    done = 0
    while True:
        order = np.argsort(keys, kind="stable")
        done += 1
        tick(done / num_sorts)
        if sorted_depth == depth:
            break
        ranks, num_ranks = _ranks(keys, order)
        if num_ranks == len(tokens):  # no two are equal any more
            break
        step = min(sorted_depth, depth - sorted_depth)  # at most to the depth itself: the halves may overlap
        keys = ranks.astype(np.uint64) << np.uint64(32)
        keys[:-step] |= ranks[step:]
        sorted_depth += step
    return order.astype(np.uint32)


def check_sortable(num_tokens: int, depth: int) -> None:
    """Raise ConfigError if there are too many tokens, or if depth is below 1."""
    if num_tokens > MAX_TOKENS or depth < 1:
        raise ConfigError(
            f"{num_tokens:,} tokens to sort by depth {depth}, but an index holds at most {MAX_TOKENS:,} and sorts by "
            "at least 1. Split the corpus into several indices, or raise the depth."
        )


def _first_keys(tokens: NDArray[Any], depth: int) -> tuple[NDArray[np.uint64], int]:
    """Pack as many tokens as 64 bits hold so that numbers sort as they do, and return how many that is.

    Tokens are replaced by their rank among those that occur, from 1; 0 stands beyond the corpus's end.
    """
    values, inverse = np.unique(tokens, return_inverse=True)
    bits = len(values).bit_length()
    count = min(64 // bits, depth, len(tokens))
    ranks = inverse.astype(np.uint64) + np.uint64(1)
    keys = np.zeros(len(tokens), dtype=np.uint64)
    for offset in range(count):
        keys <<= np.uint64(bits)
        keys[: len(tokens) - offset] |= ranks[offset:]
    return keys, depth if count == len(tokens) else count


def _ranks(keys: NDArray[np.uint64], order: NDArray[np.intp]) -> tuple[NDArray[np.uint32], int]:
    """Rank of every position's key, from 1, equal for equal keys; and the highest."""
    in_order = keys[order]
    steps = np.ones(len(keys), dtype=np.uint32)
    np.not_equal(in_order[1:], in_order[:-1], out=steps[1:], casting="unsafe")
    np.cumsum(steps, out=steps)
    ranks = np.empty_like(steps)
    ranks[order] = steps
    return ranks, int(steps[-1])


FORMAT = "forerun-index"
FORMAT_VERSION = 1
COMPACT_VERSION = 2
"""Version of files without a suffix array."""
SUFFIX_BYTES = 4
_START = f'{{"format": "{FORMAT}"'.encode()
_PAGE = 4096
_MAX_HEADER = 1 << 20
MAX_IN_MEMORY = 1 << 26
"""Bytes of a file up to which it is read into memory and not mapped."""
_REBUILD = "Build it anew: forerun index build OUT SOURCES..."


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """The description of an index.

    Attributes:
        num_tokens: end markers included.
        num_documents: each ended by one marker.
        token_bytes: 2 or 4.
        depth: tokens by which the suffixes are sorted.
        vocab_size: every token is below it.
        tokenizer: the name under which the tokenizer was loaded.
        fingerprint: of that tokenizer; empty where there was none.
        checksum: of all that follows the header.
        compact: the file holds no suffix array; the tokens are sorted at each opening.
    """

    num_tokens: int
    num_documents: int
    token_bytes: int
    depth: int
    vocab_size: int
    tokenizer: str
    fingerprint: str
    checksum: str
    compact: bool = False

    @property
    def version(self) -> int:
        """Return the version of the file's format."""
        return COMPACT_VERSION if self.compact else FORMAT_VERSION

    @property
    def marker(self) -> int:
        """Return the number that ends a document."""
        return (1 << 8 * self.token_bytes) - 1

    @property
    def num_data_bytes(self) -> int:
        """Return the bytes of the tokens and, if it is stored, of the suffix array."""
        return self.num_tokens * (self.token_bytes + (0 if self.compact else SUFFIX_BYTES))


def token_bytes_for(vocab_size: int) -> int:
    """Return 2 if every token and the end marker fit in 16 bits, else 4."""
    return 2 if vocab_size < 1 << 16 else 4


def write_file(
    path: Path, header: IndexHeader, tokens: NDArray[Any], suffixes: NDArray[np.uint32] | None
) -> IndexHeader:
    """Write the index, whole or not at all; readers that have the old one mapped keep it.

    Args:
        header: its checksum is computed here.
        tokens: [n], markers included. suffixes: [n]; None where the header says compact.

    Returns:
        The header as written.

    Raises:
        ConfigError: the file cannot be written.
    """
    data = [np.ascontiguousarray(tokens, dtype=f">u{header.token_bytes}").data.cast("B")]
    if suffixes is not None:
        data.append(np.ascontiguousarray(suffixes, dtype=f"<u{SUFFIX_BYTES}").data.cast("B"))
    written = replace(header, checksum=digest(*data))
    write_bytes(path, _encode(written), *data, error=ConfigError)
    return written


def read_index_header(path: Path) -> tuple[IndexHeader, int]:
    """Read the header, and return it with the offset of the tokens in the file. The data are not read.

    Raises:
        ConfigError: no such file; not an index; of another version; damaged or cut short.
    """
    try:
        with open_regular(path) as file:
            line = file.readline(_MAX_HEADER)
            size = os.fstat(file.fileno()).st_size
    except (OSError, ValueError) as error:
        raise ConfigError(f"The index {path} cannot be read: {error}. {_REBUILD}") from None
    if not line.startswith(_START):
        raise ConfigError(f"{path} is not an index of forerun (its first bytes are {line[:16]!r}). {_REBUILD}")
    values = Fields.parse(line, f"The index {path} is damaged: its header", ConfigError, remedy=_REBUILD)
    if (version := values.values.get("version")) not in (FORMAT_VERSION, COMPACT_VERSION):
        raise ConfigError(
            f"The index {path} is of version {str(version)[:20]}, but this forerun reads versions {FORMAT_VERSION} and "
            f"{COMPACT_VERSION}. {_REBUILD}"
        )
    header = IndexHeader(
        num_tokens=values.integer("num_tokens"),
        num_documents=values.integer("num_documents"),
        token_bytes=values.integer("token_bytes"),
        depth=values.integer("depth"),
        vocab_size=values.integer("vocab_size"),
        tokenizer=values.string("tokenizer"),
        fingerprint=values.string("fingerprint"),
        checksum=values.string("checksum"),
        compact=version == COMPACT_VERSION,
    )
    if line != _encode(header):
        raise ConfigError(f"The index {path} is damaged: its header is not as it was written. {_REBUILD}")
    if size != len(line) + header.num_data_bytes:
        raise ConfigError(
            f"The index {path} is damaged: it has {size:,} bytes and not {len(line) + header.num_data_bytes:,}, as if "
            f"it had been cut short or added to. {_REBUILD}"
        )
    return header, len(line)


@dataclass(frozen=True, slots=True)
class IndexData:
    """An index's data.

    Attributes:
        data: small files are held in memory; larger ones are mapped, so that pages are read as they are needed.
        start: where in `data` the tokens start.
        file: the mapped file, open; None where the data are in memory.
    """

    header: IndexHeader
    data: bytes | mmap.mmap
    start: int
    file: FileIO | None

    @property
    def tokens(self) -> NDArray[Any]:
        """Return [n] tokens, the high byte first."""
        return np.frombuffer(self.data, f">u{self.header.token_bytes}", self.header.num_tokens, self.start)

    @property
    def suffixes(self) -> NDArray[Any]:
        """Return [n] positions; computed here for a compact index."""
        if self.header.compact:
            return sort_suffixes(self.tokens, self.header.depth)
        start = self.start + self.header.num_tokens * self.header.token_bytes
        return np.frombuffer(self.data, f"<u{SUFFIX_BYTES}", self.header.num_tokens, start)


def open_file(path: Path, check: Callable[[IndexHeader], None] = lambda header: None) -> IndexData:
    """Open the index, and compare it with its checksum.

    Args:
        check: may refuse an index by its header before the data are read.

    Raises:
        ConfigError: as `read_index_header`; the checksum differs.
    """
    header, start = read_index_header(path)
    check(header)
    try:
        if start + header.num_data_bytes <= MAX_IN_MEMORY:
            stored = IndexData(header, path.read_bytes(), start, None)
            found = digest(memoryview(stored.data)[start:])
        else:
            # unbuffered: nothing is read before the hash has gone past the header
            file = path.open("rb", buffering=0)
            file.seek(start)
            found = file_digest(file)  # read, not mapped: a map of a file that shrinks meanwhile ends the process
            stored = IndexData(header, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), start, file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"The index {path} cannot be read: {error}. {_REBUILD}") from None
    if found != header.checksum or len(stored.data) != start + header.num_data_bytes:
        raise ConfigError(f"The index {path} is damaged: its data do not agree with their checksum. {_REBUILD}")
    return stored


def _encode(header: IndexHeader) -> bytes:
    """Encode the header as a line with its own checksum, padded to whole pages so that the tokens are aligned."""
    values = {"format": FORMAT, "version": header.version, **asdict(header)}
    del values["compact"]  # the version says it
    values["header_checksum"] = digest(json.dumps(values).encode())
    text = json.dumps(values).encode()
    return text.ljust(-(-(len(text) + 1) // _PAGE) * _PAGE - 1) + b"\n"
