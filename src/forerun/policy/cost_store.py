"""Measured costs, kept for the next engine of the same models on the same machine, and for the next process."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from contextlib import suppress
from pathlib import Path

from forerun.config import COST_CACHE_VARIABLE, environment_choice
from forerun.errors import ConfigError
from forerun.files.json_file import Fields
from forerun.files.write import write_json
from forerun.home import COSTS_FILE, home
from forerun.policy.costs import CostModel

COST_CACHE_ENTRIES = 64
"""Settings kept in the file; the one written longest ago is dropped first."""
_VERSION = 3
_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What a damaged entry may raise."""

_log = logging.getLogger(__name__)
_known: dict[str, CostModel] = {}
_warned: set[Path] = set()


def cache_file() -> Path | None:
    """Where costs are kept, in forerun's folder. None without one, or where FORERUN_COST_CACHE is 0.

    Raises:
        ConfigError: it is neither 0 nor 1.
    """
    if environment_choice(COST_CACHE_VARIABLE, ("0", "1")) == "0":
        return None
    base = home()
    return None if base is None else base / COSTS_FILE


class StoredCosts:
    """The costs of one setting, which all its engines in this process share.

    The file is a convenience: where it cannot be read or written, costs are measured again. A damaged file is renamed
    to costs.json.damaged, a damaged entry is left out when the file is next written, with one warning.

    Args:
        setting: all that costs depend on, such as models, number format and threads; the machine is added.
    """

    def __init__(self, setting: tuple[str, ...]) -> None:
        self._key = key_here(setting)
        if self._key not in _known:
            _known[self._key] = _read().get(self._key) or CostModel()
        self.costs = _known[self._key]

    def save(self) -> None:
        """Write what was learned so far, beside what other settings have written."""
        file = cache_file()
        if file is None:
            return
        entries = _read()
        entries.pop(self._key, None)
        entries[self._key] = self.costs
        kept = {key: costs.state() for key, costs in list(entries.items())[-COST_CACHE_ENTRIES:]}
        with suppress(ConfigError, ValueError):  # ValueError: a number that is not finite
            write_json(file, {"version": _VERSION, "entries": kept}, error=ConfigError, indent=None)


def key_here(setting: tuple[str, ...]) -> str:
    """The key of a setting on this machine."""
    machine = (platform.node(), platform.machine(), str(os.cpu_count()))
    return hashlib.sha256("\n".join((*setting, *machine)).encode()).hexdigest()[:32]


def suggest(key: str, costs: CostModel) -> None:
    """Costs of a setting on this machine that were measured earlier, for engines to begin with; those that are known
    already stay."""
    if key not in _known and key not in _read():
        _known[key] = costs


def _read() -> dict[str, CostModel]:
    """Key -> costs of every sound entry, the oldest first; empty if there is no readable file of this version."""
    file = cache_file()
    if file is None or not os.path.lexists(file):
        return {}
    try:
        content = Fields.read(file, ConfigError)
        states = content.fields("entries").values if content.integer("version") == _VERSION else {}
    except ConfigError:
        _warn(file, f"It is kept as {_set_aside(file)}.")
        return {}
    entries = {}
    for key, state in states.items():
        try:
            entries[key] = CostModel.restored(state)
        except _DAMAGE:
            _warn(file, "Its damaged entries are left out.")
    return entries


def _set_aside(file: Path) -> Path:
    damaged = file.with_name(file.name + ".damaged")
    try:
        return file.replace(damaged)
    except OSError:
        return file


def _warn(file: Path, consequence: str) -> None:
    """Once a file and process."""
    if file not in _warned:
        _warned.add(file)
        _log.warning("The file of measured costs %s is damaged. %s Costs are measured again.", file, consequence)
