"""Pages: where they come from, where they go, and what is in them."""

import pytest
import torch

from forerun.cache import PagedCache, PagePool
from forerun.kernels.page_layout import PAGE, PageLayout

SHAPES = [(2, 5, 3), (1, 16, 20)]


class Pages:
    """A pool and its layout."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.layout = PageLayout(SHAPES, dtype)
        self.pool = PagePool(self.layout.nbytes, self.layout.new_page)

    def cache(self) -> PagedCache:
        return PagedCache(self.pool, self.layout)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def pages(request: pytest.FixtureRequest) -> Pages:
    return Pages(request.param)


def test_bytes_are_those_of_the_pages(pages: Pages) -> None:
    cache = pages.cache()
    a_page = PAGE * (2 * (5 + 16) + 1 * (16 + 32)) * pages.layout.dtype.itemsize  # values in whole vectors
    assert cache.nbytes == 0
    for rows, count in ((1, 1), (PAGE - 1, 1), (1, 2), (2 * PAGE, 4), (PAGE - 1, 4), (1, 5)):
        cache.feed([-1] * rows)
        cache.commit(range(rows))
        assert (len(cache.pages), cache.nbytes) == (count, count * a_page)


def test_pages_are_given_back_and_come_again_without_what_was_in_them(pages: Pages) -> None:
    first, second = pages.cache(), pages.cache()
    first.feed(range(-1, 2 * PAGE))
    second.feed([-1])
    assert (pages.pool.num_taken, len(pages.pool._free)) == (4, 0)
    for page in first.pages:
        page.fill_(torch.nan)
    used = set(first.addresses.tolist())
    first.free()
    assert (pages.pool.num_taken, len(pages.pool._free)) == (1, 3)
    assert len(first.addresses) == first.nbytes == 0
    second.feed(range(PAGE))
    assert (pages.pool.num_taken, len(pages.pool._free)) == (2, 2)
    assert int(second.addresses[1]) in used and not second.pages[1].any()


def test_addresses_are_made_again_only_when_pages_are_added(pages: Pages) -> None:
    cache = pages.cache()
    cache.feed([-1] * 3)
    before = cache.addresses
    cache.commit([0, 2])
    cache.feed([-1] * (PAGE - 2))
    assert cache.addresses is before
    cache.feed([-1])
    assert len(before) == 1 and len(cache.addresses) == 2
    assert cache.addresses.tolist() == [page.data_ptr() for page in cache.pages]
    assert not (cache.addresses % 64).any() and cache.addresses.flags.c_contiguous


def test_memory_that_cannot_be_had_leaves_the_cache_as_it_was(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pages.cache()
    cache.feed([-1])
    cache.commit([0])

    def fail() -> torch.Tensor:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(pages.pool, "_new_page", fail)
    with pytest.raises(RuntimeError, match="memory"):
        cache.feed([-1] * PAGE)
    assert (cache.length, cache.num_scratch, len(cache.pages), pages.pool.num_taken) == (1, 0, 1, 1)


def test_a_cache_that_is_forgotten_gives_its_pages_back() -> None:
    layout = PageLayout(SHAPES, torch.float32)
    pool = PagePool(layout.nbytes, layout.new_page)
    pool.limit(3)
    cache = PagedCache(pool, layout)
    cache.feed([-1])
    assert pool.num_available == 2
    del cache
    assert pool.num_available == 3
    pool.check_integrity()
