"""Measured costs, kept for the next engine of the same models on the same machine, and for the next process."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from contextlib import suppress
from pathlib import Path

import torch

from forerun.config import COST_CACHE_VARIABLE, environment_choice
from forerun.errors import ConfigError
from forerun.speculation.cost_model import CostModel
from forerun.utils.files import locked, write_json
from forerun.utils.home import COSTS_STEM, home
from forerun.utils.json_file import Fields

COST_CACHE_ENTRIES = 64
"""Settings kept in the file; the one written longest ago is dropped first."""
_VERSION = 4
_LOCK_WAIT = 5.0
"""Seconds to wait for other processes that write the file, after which costs are not saved this time."""
_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What a damaged entry may raise."""

_log = logging.getLogger(__name__)
_known: dict[str, CostModel] = {}
_warned: set[Path] = set()


def cache_file() -> Path | None:
    """Return the file of costs in forerun's folder. None without one, or where FORERUN_COST_CACHE is 0.

    Its name has its version: other versions of forerun have files of their own.

    Raises:
        ConfigError: it is neither 0 nor 1.
    """
    if environment_choice(COST_CACHE_VARIABLE, ("0", "1")) == "0":
        return None
    base = home()
    return None if base is None else base / f"{COSTS_STEM}-{_VERSION}.json"


class StoredCosts:
    """The costs of one setting, which all its engines in this process share.

    The file is a convenience: where it cannot be read or written, costs are measured again. When it is next written, a
    damaged file gets `.damaged` appended to its name, and a damaged entry is left out, with one warning.

    Args:
        setting: all that costs depend on, such as models, number format and threads; the machine is added.
    """

    def __init__(self, setting: tuple[str, ...]) -> None:
        self._key = key_here(setting)
        if self._key not in _known:
            _known[self._key] = _read().get(self._key) or CostModel()
        self.costs = _known[self._key]

    def save(self) -> None:
        """Write what was measured, beside what other settings have written. Only calibrations do: what is learned in
        use depends on what else the machine does."""
        file = cache_file()
        if file is None:
            return
        # ValueError: a number that is not finite
        with suppress(ConfigError, ValueError), locked(file, ConfigError, wait=_LOCK_WAIT):
            entries = _read(sets_aside=True)
            entries.pop(self._key, None)
            entries[self._key] = self.costs
            kept = {key: costs.state() for key, costs in list(entries.items())[-COST_CACHE_ENTRIES:]}
            write_json(file, {"version": _VERSION, "entries": kept}, error=ConfigError, indent=None)


def forward_costs(target: str) -> StoredCosts:
    """Return the costs of the forwards of a target, which all its drafters share. target: what `identity` says."""
    return StoredCosts(costs_setting((target, "forwards")))


def key_here(setting: tuple[str, ...]) -> str:
    """Return the key of a setting on this machine."""
    machine = (platform.node(), platform.machine(), str(os.cpu_count()))
    return _plain_key((*setting, *machine))


def _read(*, sets_aside: bool = False) -> dict[str, CostModel]:
    """Read key -> costs of every sound entry, the oldest first; empty if there is no sound file.

    Args:
        sets_aside: rename a damaged file, which wants the lock.
    """
    file = cache_file()
    if file is None or not os.path.lexists(file):
        return {}
    try:
        content = Fields.read(file, ConfigError)
        content.integer("version", low=_VERSION, high=_VERSION)
        states = content.fields("entries").values
    except ConfigError:
        damaged = file.with_name(f"{file.name}.damaged")
        _warn(file, f"It is kept as {damaged}.")
        if sets_aside:
            with suppress(OSError):
                file.replace(damaged)
        return {}
    entries = {}
    for key, state in states.items():
        try:
            entries[key] = CostModel.restored(state)
        except _DAMAGE:
            _warn(file, "Its damaged entries are left out.")
    return entries


def _warn(file: Path, consequence: str) -> None:
    """Log a warning, once for a file and process."""
    if file not in _warned:
        _warned.add(file)
        _log.warning("The file of measured costs %s is damaged. %s Costs are measured again.", file, consequence)


def costs_setting(cost_key: tuple[str, ...]) -> tuple[str, ...]:
    """Return all that costs depend on besides the machine."""
    return (*cost_key, str(torch.get_num_threads()))


def _plain_key(cost_key: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join(cost_key).encode()).hexdigest()[:32]
