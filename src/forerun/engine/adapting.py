"""Drafters that go on learning while they serve, as the engine knows them: what teaches them lies above it, and is
found by its name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from forerun.config import AdaptOptions
from forerun.drafters import Drafter

_PACKAGE = "forerun.adaptation"
"""It imports the code of training, which the core never loads, and takes seconds."""


class Adapting(Protocol):
    """A drafter that goes on learning (`adaptation.Adaptation`)."""

    def progress(self, tenant: str | None = None) -> Any:
        """Return what has come of a tenant's learning, a dataclass."""

    def total(self) -> dict[str, float]:
        """Return the sums over all tenants."""

    def save(self, folder: str | Path, tenant: str | None = None) -> None:
        """Write the copy that drafts for a tenant as a folder that can be loaded as a drafter.

        Raises:
            ConfigError: no copy drafts for it, or the folder cannot be written.
        """

    def close(self) -> None:
        """End the learning."""


def start_adapting(drafter: Drafter | None, options: AdaptOptions, is_busy: Callable[[], bool]) -> Adapting:
    """Let a bound drafter learn from now on. Call this before its first sequence.

    is_busy: whether there are requests; any thread may call it.

    Raises:
        DrafterError: nothing of the drafter can be adapted.
        ConfigError: the target does not compute on the CPU.
    """
    made: Adapting = import_module(_PACKAGE).Adaptation(drafter, options, is_busy)
    return made
