"""GGUF files: which paths are some, and, in the modules of this folder, what they hold."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from forerun.utils.json_file import open_regular

SUFFIX = ".gguf"
MAGIC = b"GGUF"
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)


def is_gguf(path: Path) -> bool:
    """Return whether a path is called a GGUF file, or is a file that begins as one: those in a store of blobs have no
    extension."""
    if path.suffix.lower() == SUFFIX:
        return not path.is_dir()
    with suppress(OSError, ValueError), open_regular(path) as file:
        return file.read(len(MAGIC)) == MAGIC
    return False  # a folder, nothing, a pipe, or no path


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all parts of a model, the first one first, whether they exist or not: those that the name of
    one, NAME-00002-of-00003.gguf, speaks of; for any other name, the path."""
    named = _PART.search(path.name)
    if named is None or not 1 <= int(named[1]) <= int(named[2]):
        return [path]
    stem = path.name[: named.start()]
    count = named[2]
    suffix = path.suffix
    return [path.with_name(f"{stem}-{number:05}-of-{count}{suffix}") for number in range(1, int(count) + 1)]
