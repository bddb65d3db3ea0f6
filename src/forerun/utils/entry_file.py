"""A file of entries by key in forerun's folder, which processes share: what was measured or tested on this machine."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from forerun.config import COST_CACHE_VARIABLE, environment_choice
from forerun.errors import ConfigError
from forerun.utils.files import locked, write_json
from forerun.utils.home import home
from forerun.utils.json_file import Fields

T = TypeVar("T")
NUM_ENTRIES = 64
"""Entries kept in a file; the one written longest ago is dropped first."""
_LOCK_WAIT = 5.0
"""Seconds to wait for other processes that write the file, after which an entry is not saved this time."""
_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What a damaged entry may raise."""

_log = logging.getLogger(__name__)
_warned: set[Path] = set()


class EntryFile(Generic[T]):
    """The file is a convenience: where it cannot be read or written, there are no entries. When it is next written, a
    damaged file gets `.damaged` appended to its name, and a damaged entry is left out, with one warning.

    Args:
        stem, version: of its name: other versions of forerun have files of their own.
        contents: what it holds, as the warning names it.
        restored: makes an entry of its JSON value, or raises one of the errors that damage causes.
        state: makes the JSON value of an entry.
    """

    def __init__(
        self, stem: str, version: int, contents: str, restored: Callable[[Any], T], state: Callable[[T], object]
    ) -> None:
        self._name = f"{stem}-{version}.json"
        self._version = version
        self._contents = contents
        self._restored = restored
        self._state = state

    def path(self) -> Path | None:
        """Return the file in forerun's folder. None without one, or where FORERUN_COST_CACHE is 0.

        Raises:
            ConfigError: it is neither 0 nor 1.
        """
        if environment_choice(COST_CACHE_VARIABLE, ("0", "1")) == "0":
            return None
        base = home()
        return None if base is None else base / self._name

    def read(self, *, sets_aside: bool = False) -> dict[str, T]:
        """Read key -> every sound entry, the oldest first; empty if there is no sound file.

        Args:
            sets_aside: rename a damaged file, which wants the lock.

        Raises:
            ConfigError: as `path`.
        """
        file = self.path()
        if file is None or not os.path.lexists(file):
            return {}
        try:
            content = Fields.read(file, ConfigError)
            content.integer("version", low=self._version, high=self._version)
            states = content.fields("entries").values
        except ConfigError:
            damaged = file.with_name(f"{file.name}.damaged")
            self._warn(file, f"It is kept as {damaged}.")
            if sets_aside:
                with suppress(OSError):
                    file.replace(damaged)
            return {}
        entries = {}
        for key, state in states.items():
            try:
                entries[key] = self._restored(state)
            except _DAMAGE:
                self._warn(file, "Its damaged entries are left out.")
        return entries

    def put(self, key: str, entry: T) -> None:
        """Write an entry beside what others have written.

        Raises:
            ConfigError: as `path`.
        """
        file = self.path()
        if file is None:
            return
        # ValueError: a number that is not finite
        with suppress(ConfigError, ValueError), locked(file, ConfigError, wait=_LOCK_WAIT):
            entries = self.read(sets_aside=True)
            entries.pop(key, None)
            entries[key] = entry
            kept = {each: self._state(found) for each, found in list(entries.items())[-NUM_ENTRIES:]}
            write_json(file, {"version": self._version, "entries": kept}, error=ConfigError, indent=None)

    def _warn(self, file: Path, consequence: str) -> None:
        """Log a warning, once for a file and process."""
        if file not in _warned:
            _warned.add(file)
            _log.warning("The file of %s %s is damaged. %s They are made again.", self._contents, file, consequence)


def key_here(setting: tuple[str, ...]) -> str:
    """Return the key of a setting on this machine."""
    machine = (platform.node(), platform.machine(), str(os.cpu_count()))
    return hashlib.sha256("\n".join((*setting, *machine)).encode()).hexdigest()[:32]
