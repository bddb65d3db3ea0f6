"""Drafters that go on learning while they serve, as the engine knows them: what teaches them lies above it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from forerun.config import AdaptOptions
from forerun.drafters import Drafter
from forerun.utils.deferred import HANDED_IN


class Adapting(Protocol):
    """A drafter that goes on learning. `adaptation.Adaptation` is one, which the package hands in."""

    @abstractmethod
    def start(self) -> None:
        """Begin to learn. What was kept drafts from the first request on."""

    @abstractmethod
    def progress(self, tenant: str | None = None) -> Any:
        """Return what has come of a tenant's learning, a dataclass."""

    @abstractmethod
    def total(self) -> dict[str, float]:
        """Return the sums over all tenants."""

    @abstractmethod
    def save(self, folder: str | Path, tenant: str | None = None) -> None:
        """Write the copy that drafts for a tenant as a folder that can be loaded as a drafter.

        Raises:
            ConfigError: no copy drafts for it, or the folder cannot be written.
        """

    @abstractmethod
    def close(self) -> None:
        """End the learning."""


def new_adapting(drafter: Drafter | None, options: AdaptOptions, is_busy: Callable[[], bool]) -> Adapting:
    """Watch a bound drafter from now on, so that it can learn from `start` on. Call this before its engine is made.

    is_busy: whether there are requests; any thread may call it, after `start`.

    Raises:
        DrafterError: nothing of the drafter can be adapted.
        ConfigError: the target does not compute on the CPU.
    """
    made: Adapting = HANDED_IN["adaptation"].Adaptation(drafter, options, is_busy)
    return made
