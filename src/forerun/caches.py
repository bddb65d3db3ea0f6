"""The contracts of memory for keys and values: the cache of one sequence, and the pool that caches take pages from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from typing import Protocol


class Cache(Protocol):
    """The keys and values of one sequence in one model.

    Scratch accumulates: each forward adds its rows to those fed since the last commit, numbered from 0, and
    `Rows.parents` may name any of them. `commit` ends that account, and so does `drop`, which every forward that failed
    or whose rows are not wanted must be followed by.
    """

    @property
    def length(self) -> int:
        """Committed positions."""

    @property
    def num_scratch(self) -> int:
        """Rows fed since the last commit."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    def commit(self, path: Seq[int]) -> None:
        """Keep these of the rows fed since the last commit, root to leaf, and drop the others."""

    def drop(self, keep: int = 0) -> None:
        """Drop the rows fed since the last commit, but for the first `keep` of them."""

    def truncate(self, length: int) -> None:
        """Keep the first `length` committed positions only, and no scratch."""

    def free(self) -> None:
        """Give the memory back."""

    def pages_wanted(self, num_slots: int) -> int:
        """Pages of the model's pool that this cache must still take to hold this many slots, committed and scratch."""

    def adopt(self, token_ids: Seq[int], tenant: str | None) -> int:
        """Of an empty cache: take over the longest published prefix of these tokens.

        Args:
            token_ids: what the sequence holds. The last one is not adopted: it must be fed to have logits.
            tenant: whose published pages are looked at; None: those that were published for nobody in particular.

        Returns:
            The positions that the cache holds now: a multiple of PAGE, below len(token_ids).
        """

    def publish(self, token_ids: Seq[int], tenant: str | None) -> None:
        """token_ids[i] stands at committed position i: let other caches adopt the whole pages among them.

        Scratch is never published, and nothing is where the pool has no room for it. Called again, it goes on where it
        ended: what was published stays.
        """

    def fork(self, other: Cache, length: int) -> None:
        """Of an empty cache: hold the first `length` committed positions of another cache of the same model. Whole
        pages are shared, the rest is copied.

        Raises:
            OutOfPagesError: there is no page for the rest. The cache is empty still.
        """


class Pool(Protocol):
    """The pages that the keys and values of one model's sequences may take, of PAGE positions each.

    A page is taken by caches, published, both, or free. Published pages that no cache holds are evicted when the room
    is needed, the least recently used first.
    """

    @property
    def num_pages(self) -> int | None:
        """The bound; None without one."""

    @property
    def num_taken(self) -> int:
        """Pages that caches hold, or that are published."""

    @property
    def num_available(self) -> int:
        """Pages that can be taken now, evictable ones included; a very large number without a bound."""

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page."""

    def limit(self, num_pages: int | None) -> None:
        """Set the bound. Where more is taken, nothing can be until enough has been given back.

        Raises:
            ConfigError: num_pages is below 1.
        """

    def recount(self) -> None:
        """Count again what the caches hold, after an interrupt that may have come between a page and its count."""

    def check_integrity(self, caches: Iterable[Cache] = ()) -> None:
        """Count everything, and compare.

        Args:
            caches: all that may hold pages now.

        Raises:
            PoolIntegrityError: names what does not add up.
        """
