"""The held-out files as they ship: their reader and writer."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

from forerun.config import ASSETS
from forerun.errors import ConfigError
from forerun.train.corpus import SourceFile, hash_fraction, is_generated
from forerun.workloads import read_records, written

HELD_OUT_FILE = ASSETS / "heldout.jsonl.gz"
HELD_OUT_CORPUS = "Python source of the standard library of CPython 3.11.7"
"""What the held-out files that ship were held out from."""
MAX_BYTES = 1_500_000


def write_held_out(files: Sequence[SourceFile], path: Path, max_bytes: int = MAX_BYTES) -> int:
    """Write held-out files in the order of their hashes until `max_bytes` of text; returns how many.

    Files that say they were generated (codec tables) are left out: they are too easy to measure on.
    The bytes written depend on the files alone (no time stamp).
    """
    records: list[dict[str, str]] = []
    size = 0
    for file in sorted(files, key=lambda file: hash_fraction(file.name)):
        if is_generated(file.text):
            continue
        size += len(file.text.encode("utf-8"))
        if size > max_bytes:
            break
        records.append({"file": file.name, "text": file.text})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
        packed.write(written(records).encode("utf-8"))
    return len(records)


def read_held_out(path: Path = HELD_OUT_FILE) -> list[SourceFile]:
    """The files `write_held_out` wrote.

    Raises:
        ConfigError: `path` is missing or is not such a file.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as packed:
            records = read_records(packed, path.name)
            return [SourceFile(record.string("file"), record.string("text")) for record in records]
    except (OSError, UnicodeDecodeError, EOFError, zlib.error, ConfigError) as error:
        raise ConfigError(
            f"{path} cannot be read as held-out files ({error}). "
            "Give a gzipped JSON-lines file with `file` and `text` in every line."
        ) from error


def holds_out_the_same(files: Sequence[SourceFile]) -> bool:
    """Whether `files` hold every file that ships, unchanged: then they come from the same corpus."""
    return set(read_held_out()) <= set(files)
