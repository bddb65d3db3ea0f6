"""Where a batch's answers go: OUT, its journal, and who may write them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forerun.batch.broken import broken_path
from forerun.errors import ConfigError
from forerun.files.write import locked, refuse_to_overwrite


def journal_path(out: Path) -> Path:
    """The journal beside OUT."""
    return out.with_name(f"{out.name}.journal")


@contextmanager
def place_for(source: Path, out: Path, *, force: bool) -> Iterator[Path]:
    """The journal of OUT, which no other process has meanwhile.

    Args:
        source: the requests.
        force: begin anew, and replace OUT.

    Raises:
        ConfigError: OUT is there and no journal of a run that was to write it; OUT, or a file beside it that a run
            writes too, is the source; another process writes it.
    """
    journal = journal_path(out)
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
