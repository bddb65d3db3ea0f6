"""The held-out files as they ship: their reader."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from forerun.config import ASSETS
from forerun.errors import ConfigError
from forerun.train.corpus import SourceFile
from forerun.workloads import read_records

HELD_OUT_FILE = ASSETS / "heldout.jsonl.gz"


def read_held_out(path: Path = HELD_OUT_FILE) -> list[SourceFile]:
    """Files that were never trained on.

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
