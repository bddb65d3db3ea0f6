"""A model computed by hashing whose caches take pages of a small pool, and insist on what may be done with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq

from doubles import FakeCache, FakeModel
from forerun.errors import OutOfPagesError
from forerun.models import Forward, Rows

PAGE = 4
Prefix = tuple[str | None, tuple[int, ...]]


class FakePool:
    """Pages are counted, and published ones kept by the tokens that they end."""

    page_nbytes = 1000

    def __init__(self, num_pages: int | None = None) -> None:
        self.num_pages = num_pages
        self.private = 0
        self.published: dict[Prefix, int] = {}  # how many caches hold the page; least recently used first
        self.num_evicted = 0
        self.caches: list[PooledCache] = []

    @property
    def num_taken(self) -> int:
        return self.private + len(self.published)

    @property
    def num_available(self) -> int:
        assert self.num_pages is not None
        return self.num_pages - self.private - sum(holders > 0 for holders in self.published.values())

    def limit(self, num_pages: int | None) -> None:
        self.num_pages = num_pages

    def take(self, count: int) -> None:
        while self.num_pages is not None and self.num_taken + count > self.num_pages:
            longest = [prefix for prefix, holders in self.published.items() if not holders and self.is_leaf(prefix)]
            if not longest:
                raise OutOfPagesError("no page is left")
            del self.published[longest[0]]
            self.num_evicted += 1
        self.private += count

    def is_leaf(self, prefix: Prefix) -> bool:
        tenant, tokens = prefix
        return not any(
            other == tenant and len(more) > len(tokens) and more[: len(tokens)] == tokens
            for other, more in self.published
        )

    def recount(self) -> None:
        held = [cache for cache in self.caches if not cache.freed]
        self.private = sum(cache.num_pages - len(cache.shared) for cache in held)
        for prefix in self.published:
            self.published[prefix] = sum(prefix in cache.shared for cache in held)

    def check_integrity(self, caches: Iterable[PooledCache] = ()) -> None:
        held = list(caches)
        assert self.private == sum(cache.num_pages - len(cache.shared) for cache in held)
        for prefix, holders in self.published.items():
            assert holders == sum(prefix in cache.shared for cache in held)


class PooledCache(FakeCache):
    def __init__(self, pool: FakePool) -> None:
        super().__init__()
        self.pool = pool
        self.num_pages = 0
        self.shared: list[Prefix] = []  # of the first pages

    def pages_wanted(self, num_slots: int) -> int:
        return max(0, -(-num_slots // PAGE) - self.num_pages)

    def reserve(self, num_slots: int) -> None:
        wanted = self.pages_wanted(num_slots)
        self.pool.take(wanted)
        self.num_pages += wanted

    def adopt(self, token_ids: Seq[int], tenant: str | None) -> int:
        assert not self.length and not self.num_pages
        for end in range(PAGE, len(token_ids), PAGE):
            prefix = (tenant, tuple(token_ids[:end]))
            if prefix not in self.pool.published:
                break
            self.pool.published[prefix] = self.pool.published.pop(prefix) + 1
            self.shared.append(prefix)
            self.num_pages += 1
            self.tokens = list(token_ids[:end])
        return self.length

    def is_finite(self) -> bool:
        return True

    def publish(self, token_ids: Seq[int], tenant: str | None) -> None:
        assert list(token_ids) == self.tokens[: len(token_ids)]
        for index in range(len(self.shared), len(token_ids) // PAGE):
            prefix = (tenant, tuple(token_ids[: (index + 1) * PAGE]))
            self.pool.private -= 1
            self.pool.published[prefix] = self.pool.published.get(prefix, 0) + 1
            self.shared.append(prefix)

    def fork(self, other: PooledCache, length: int) -> None:
        assert not self.length and length <= other.length
        self.shared = other.shared[: length // PAGE]
        for prefix in self.shared:
            self.pool.published[prefix] += 1
        self.num_pages = len(self.shared)
        self.tokens = other.tokens[:length]
        self.reserve(length)

    def truncate(self, length: int) -> None:
        raise AssertionError("the engine never truncates")

    def free(self) -> None:
        super().free()
        for prefix in self.shared:
            self.pool.published[prefix] -= 1
        self.pool.private -= self.num_pages - len(self.shared)
        self.shared, self.num_pages = [], 0


class PooledModel(FakeModel):
    """`FakeModel` with a pool. num_rows counts what was computed, so what was reused shows."""

    def __init__(self, num_pages: int | None = None, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.pool = FakePool(num_pages)
        self.caches = self.pool.caches  # type: ignore[assignment]

    def new_cache(self) -> PooledCache:
        self.caches[:] = [cache for cache in self.caches if not cache.freed]
        self.caches.append(PooledCache(self.pool))
        return self.caches[-1]

    def forward(self, batch: Seq[Rows], layers: Seq[int] = ()) -> Forward:
        for rows in batch:
            cache = rows.cache
            assert isinstance(cache, PooledCache)
            cache.reserve(cache.length + cache.num_scratch + len(rows.token_ids))
        return super().forward(batch, layers)
