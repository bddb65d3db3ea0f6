"""The part of a cache's contract that deals with pages, for caches that have none."""

from __future__ import annotations

from collections.abc import Sequence


class Unpaged:
    """A base of stand-ins for caches (`caches.Cache`), of models without a pool: nothing is bounded or published."""

    def pages_wanted(self, num_slots: int) -> int:
        """None."""
        return 0

    def adopt(self, token_ids: Sequence[int], tenant: str | None) -> int:
        """There is nothing to adopt."""
        return 0

    def publish(self, token_ids: Sequence[int], tenant: str | None) -> None:
        """Nobody could adopt it."""
