"""Lines that are no requests, written aside as they are, so that they can be mended and sent again."""

from __future__ import annotations

from pathlib import Path

from forerun.batch.lines import BatchFile
from forerun.errors import ConfigError
from forerun.files.write import atomic_file


def broken_path(out: Path) -> Path:
    """The file of such lines beside OUT."""
    return out.with_name(f"{out.name}.broken")


def write_broken(requests: BatchFile, out: Path) -> Path | None:
    """The file that was written; None, and no file, where every line has a custom_id that can be read.

    Raises:
        ConfigError: it cannot be written.
    """
    path = broken_path(out)
    if not requests.num_broken:
        path.unlink(missing_ok=True)
        return None
    with atomic_file(path, ConfigError) as file:
        for line in requests.broken():
            file.write(line if line.endswith(b"\n") else line + b"\n")
    return path
