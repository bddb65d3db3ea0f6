"""Measured costs, kept for the next engine of the same models on the same machine, and for the next process."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

from forerun.config import COST_CACHE_VARIABLE
from forerun.policy.costs import CostModel

COST_CACHE_ENTRIES = 64
"""Settings kept in the file; the one written longest ago is dropped first."""
_VERSION = 1
_known: dict[str, CostModel] = {}


def cache_file() -> Path | None:
    """Where costs are kept: in the user's cache folder. None where the variable FORERUN_COST_CACHE is 0."""
    if os.environ.get(COST_CACHE_VARIABLE, "1") == "0":
        return None
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(home) if home else Path.home() / ".cache"
    except RuntimeError:  # a user without a home
        return None
    return base / "forerun" / "costs.json"


class StoredCosts:
    """The costs of one setting, which all its engines learn together.

    The file is a convenience: what cannot be read or written is done without, silently.

    Args:
        setting: all that costs depend on, such as models, number format and threads; the machine is added.
    """

    def __init__(self, setting: tuple[str, ...]) -> None:
        machine = (platform.node(), platform.machine(), str(os.cpu_count()))
        self._key = hashlib.sha256("\n".join((*setting, *machine)).encode()).hexdigest()[:32]
        if self._key not in _known:
            _known[self._key] = _restored(_read().get(self._key))
        self.costs = _known[self._key]

    def save(self) -> None:
        """Write what was learned so far, beside what other settings have written."""
        file = cache_file()
        if file is None:
            return
        entries = _read()
        entries.pop(self._key, None)
        entries[self._key] = self.costs.state()
        kept = dict(list(entries.items())[-COST_CACHE_ENTRIES:])
        temporary = ""
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                json.dump({"version": _VERSION, "entries": kept}, out)
            Path(temporary).replace(file)
        except OSError:
            if temporary:
                Path(temporary).unlink(missing_ok=True)


def _read() -> dict[str, Any]:
    """Key -> state, the oldest first; empty if there is no readable file."""
    file = cache_file()
    if file is None:
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        entries = content["entries"] if content["version"] == _VERSION else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _restored(state: Any) -> CostModel:
    costs = CostModel()
    if state is not None:
        try:
            costs.restore(state)
        except (ValueError, TypeError, KeyError, AttributeError):
            return CostModel()
    return costs
