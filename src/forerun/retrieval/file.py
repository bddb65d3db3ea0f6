"""The index as one file: a line of JSON, the tokens, the suffix array. Mapped, never unpickled.

Tokens are stored with the high byte first: then comparing bytes compares tokens, and a binary search needs no more than
slices of the map. Every document is followed by the end marker, the largest number of the type, which no token is.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.errors import ConfigError

FORMAT = "forerun-index"
FORMAT_VERSION = 1
SUFFIX_BYTES = 4
_START = f'{{"format": "{FORMAT}"'.encode()
_PAGE = 4096
_MAX_HEADER = 1 << 20
_REBUILD = "Build it anew: forerun index build OUT SOURCES..."


@dataclass(frozen=True, slots=True)
class Header:
    """What an index says of itself.

    Attributes:
        num_tokens: end markers included.
        num_documents: each ended by one marker.
        token_bytes: 2 or 4.
        depth: tokens by which the suffixes are sorted.
        vocab_size: every token is below it.
        tokenizer: the name under which the tokenizer was loaded.
        fingerprint: of that tokenizer; empty where there was none.
        checksum: of tokens and suffix array.
    """

    num_tokens: int
    num_documents: int
    token_bytes: int
    depth: int
    vocab_size: int
    tokenizer: str
    fingerprint: str
    checksum: str

    @property
    def marker(self) -> int:
        """The number that ends a document."""
        return (1 << 8 * self.token_bytes) - 1

    @property
    def num_data_bytes(self) -> int:
        return self.num_tokens * (self.token_bytes + SUFFIX_BYTES)


def token_bytes_for(vocab_size: int) -> int:
    """2 where every token and the end marker fit in 16 bits, else 4."""
    return 2 if vocab_size < 1 << 16 else 4


def digest(*parts: Any) -> str:
    """BLAKE2b of the bytes, 16 of them, in hexadecimal."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(part)
    return state.hexdigest()


def write_file(path: Path, header: Header, tokens: NDArray[Any], suffixes: NDArray[np.uint32]) -> Header:
    """Write the index, whole or not at all; whoever has the old one mapped keeps it.

    Args:
        header: its checksum is computed here.
        tokens: [n], markers included. suffixes: [n].

    Returns:
        The header as written.

    Raises:
        ConfigError: the file cannot be written.
    """
    data = (
        np.ascontiguousarray(tokens, dtype=f">u{header.token_bytes}").data.cast("B"),
        np.ascontiguousarray(suffixes, dtype=f"<u{SUFFIX_BYTES}").data.cast("B"),
    )
    values = {**asdict(header), "checksum": digest(*data)}
    line = _encode(values)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                for part in (line, *data):
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)  # noqa: PTH101 (mkstemp allows the owner alone)
            os.replace(name, path)  # noqa: PTH105
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"The index {path} cannot be written: {error.strerror}. Give another place.") from error
    return Header(**values)


def read_header(path: Path) -> tuple[Header, int]:
    """The header, and where in the file the tokens start. The data are not read.

    Raises:
        ConfigError: no such file; not an index; of another version; damaged or cut short.
    """
    try:
        with path.open("rb") as file:
            line = file.readline(_MAX_HEADER)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ConfigError(f"The index {path} cannot be read: {error.strerror}. {_REBUILD}") from None
    if not line.startswith(_START):
        raise ConfigError(f"{path} is not an index of forerun (its first bytes are {line[:16]!r}). {_REBUILD}")
    try:
        values = json.loads(line)
    except ValueError:
        raise ConfigError(f"The index {path} is damaged: its header is not JSON. {_REBUILD}") from None
    if values.get("version") != FORMAT_VERSION:
        raise ConfigError(
            f"The index {path} is of version {values.get('version')!r}, but this forerun reads version "
            f"{FORMAT_VERSION}. {_REBUILD}"
        )
    own = {field.name: values.get(field.name) for field in fields(Header)}
    if line != _encode(own):
        raise ConfigError(f"The index {path} is damaged: its header is not as it was written. {_REBUILD}")
    header = Header(**own)
    if size != len(line) + header.num_data_bytes:
        raise ConfigError(
            f"The index {path} is damaged: it has {size:,} bytes and not {len(line) + header.num_data_bytes:,}, as if "
            f"it had been cut short or added to. {_REBUILD}"
        )
    return header, len(line)


def map_file(
    path: Path, check: Callable[[Header], None] = lambda header: None
) -> tuple[Header, mmap.mmap, int, NDArray[Any], NDArray[Any]]:
    """The index, mapped and compared with its checksum.

    Args:
        check: may refuse an index by its header before the data are read.

    Returns:
        The header, the map, where in it the tokens start, tokens [n] (high byte first) and suffix array [n].

    Raises:
        ConfigError: as `read_header`; the checksum differs.
    """
    header, start = read_header(path)
    check(header)
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ConfigError(f"The index {path} cannot be mapped: {error.strerror}. {_REBUILD}") from None
    if digest(memoryview(mapped)[start:]) != header.checksum:
        raise ConfigError(f"The index {path} is damaged: its data do not agree with their checksum. {_REBUILD}")
    count = header.num_tokens
    tokens = np.frombuffer(mapped, dtype=f">u{header.token_bytes}", count=count, offset=start)
    suffixes = np.frombuffer(mapped, f"<u{SUFFIX_BYTES}", count, start + count * header.token_bytes)
    return header, mapped, start, tokens, suffixes


def _encode(values: Mapping[str, Any]) -> bytes:
    """The header's line, with its own checksum, filled up to whole pages so that the tokens are aligned."""
    values = {"format": FORMAT, "version": FORMAT_VERSION, **values}
    values["header_checksum"] = digest(json.dumps(values).encode())
    text = json.dumps(values).encode()
    return text.ljust(-(-(len(text) + 1) // _PAGE) * _PAGE - 1) + b"\n"
