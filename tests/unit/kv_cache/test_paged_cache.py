"""Pages: where they come from, where they go, and what is in them."""

from collections.abc import Sequence

import pytest
import torch

from forerun.errors import OutOfPagesError
from forerun.kernels.cpu.page_layout import CACHE_FORMATS, PAGE, PageLayout
from forerun.kv_cache import PagedCache, PagePool
from pool_integrity import check_integrity

SHAPES = [(2, 5, 3), (1, 16, 20)]


class Pages:
    """A pool and its layout."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.layout = PageLayout(SHAPES, dtype)
        self.pool = PagePool(self.layout.nbytes, self.layout.new_page)

    def cache(self) -> PagedCache:
        return PagedCache(self.pool, self.layout)


@pytest.fixture(params=CACHE_FORMATS, ids=str)
def pages(request: pytest.FixtureRequest) -> Pages:
    return Pages(request.param)


def test_bytes_are_those_of_the_pages(pages: Pages) -> None:
    cache = pages.cache()
    a_page = PAGE * (2 * (5 + 16) + 1 * (16 + 32)) * pages.layout.dtype.itemsize  # values in whole vectors
    a_page += PAGE * 8 * (2 + 1) if pages.layout.dtype == torch.int8 else 0  # scales
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
        page.view(torch.int8).fill_(-1)  # NaN, as a float
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
    check_integrity(pool)


TEXT = [place % 7 + place // PAGE for place in range(3 * PAGE)]
LENGTHS = (0, 1, PAGE - 1, PAGE, PAGE + 20, 2 * PAGE)
"""To which three pages are cut."""


def compute(cache: PagedCache, tokens: Sequence[int]) -> None:
    """Append tokens: each is what the keys of its position are, and the negative of its values."""
    cache.feed(range(-1, len(tokens) - 1))
    numbers = torch.tensor(tokens, dtype=torch.float32).view(1, -1, 1)
    for layer, (heads, key_width, value_width) in enumerate(SHAPES):
        cache.write(layer, 0, numbers.expand(heads, -1, key_width), -numbers.expand(heads, -1, value_width))
    cache.commit(range(len(tokens)))


def tokens_in(cache: PagedCache) -> list[int]:
    """What was appended, checked to be the same in every layer, head and lane."""
    if not cache.length:
        return []
    tokens = cache.read(0)[0][0, :, 0]
    for layer in range(len(SHAPES)):
        keys, values = cache.read(layer)
        assert bool((keys == tokens.view(1, -1, 1)).all()) and bool((values == -tokens.view(1, -1, 1)).all())
    return [int(token) for token in tokens]


def sharing(pages: Pages, way: str) -> tuple[PagedCache, list[PagedCache]]:
    """A cache of three pages, and others that hold the same text in the same pages, or in none of them."""
    first, second = pages.cache(), pages.cache()
    compute(first, TEXT)
    if way in ("forked", "forked from", "left behind", "left alone"):
        second.fork(first, len(TEXT) - PAGE // 2)
    if way == "forked":
        return second, [first]
    if way == "forked from":
        return first, [second]
    if way == "left behind":
        second.truncate(PAGE)
        return first, [second]
    if way == "left alone":
        second.free()
    if way in ("published", "adopted"):
        first.publish(TEXT, None)
    if way == "adopted":
        second.adopt([*TEXT, 0], None)
        first.free()
        return second, []
    return first, []


WAYS = pytest.mark.parametrize(
    "way", ["alone", "published", "adopted", "forked", "forked from", "left behind", "left alone"]
)


def leave_available(pool: PagePool, count: int) -> None:
    """Bound the pool so that so many pages are to be had."""
    pool.limit(1000)
    pool.limit(max(1, 1000 - pool.num_available + count))
    assert pool.num_available >= count


@WAYS
@pytest.mark.parametrize("length", LENGTHS)
def test_as_many_pages_as_are_wanted_are_taken(pages: Pages, way: str, length: int) -> None:
    """No more than those need be available."""
    for num_slots in (length + 1, length + PAGE, 4 * PAGE):
        cache, _ = sharing(pages, way)
        cache.truncate(length)
        before, wanted = {*cache.held}, cache.pages_wanted(num_slots)
        leave_available(pages.pool, wanted)
        cache.feed([-1] * (num_slots - length))
        assert len({*cache.held} - before) == wanted
        assert cache.pages_wanted(num_slots) == 0
        cache.free()
        pages.pool.limit(None)


@WAYS
@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_written_after_a_cut_changes_nothing_that_others_have(pages: Pages, way: str, length: int) -> None:
    cache, others = sharing(pages, way)
    cache.truncate(length)
    compute(cache, [90] * 70)
    assert tokens_in(cache) == TEXT[:length] + [90] * 70
    for other in others:
        assert tokens_in(other) == TEXT[: other.length]
    late = pages.cache()
    late.adopt([*TEXT, 0], None)
    assert tokens_in(late) == TEXT[: late.length]
    check_integrity(pages.pool, [cache, late, *others])


@pytest.mark.parametrize("length", LENGTHS)
def test_pages_that_nobody_else_has_stay_where_they_are(pages: Pages, length: int) -> None:
    """However they were shared before: whoever is left alone with a page writes into it."""
    cache, _ = sharing(pages, "left alone")
    num_kept = -(-length // PAGE)
    before = cache.addresses[:num_kept].tolist()
    cache.truncate(length)
    compute(cache, [90] * 70)
    assert cache.addresses[:num_kept].tolist() == before


def test_shared_pages_beyond_a_cut_can_be_taken_at_once(pages: Pages) -> None:
    cache, _ = sharing(pages, "adopted")
    leave_available(pages.pool, 0)
    cache.truncate(PAGE)
    assert pages.pool.num_available == 2
    compute(pages.cache(), TEXT[: 2 * PAGE])
    assert tokens_in(cache) == TEXT[:PAGE]


def test_of_published_pages_those_that_nobody_holds_can_be_taken_and_no_others(pages: Pages) -> None:
    cache, _ = sharing(pages, "published")
    leave_available(pages.pool, 0)
    cache.free()
    reader, writer = pages.cache(), pages.cache()
    reader.adopt(TEXT[: PAGE + 1], None)
    assert pages.pool.num_available == 2
    compute(writer, [90] * 2 * PAGE)
    with pytest.raises(OutOfPagesError):
        writer.feed([-1])
    assert tokens_in(reader) == TEXT[:PAGE]
    check_integrity(pages.pool, [reader, writer])


def beside_a_fork(pages: Pages) -> tuple[PagedCache, PagedCache, PagedCache]:
    """Return a cache that publishes two pages, its fork, and a cache that has published the first before."""
    first, fork, other = pages.cache(), pages.cache(), pages.cache()
    compute(first, TEXT[: 2 * PAGE])
    fork.fork(first, 2 * PAGE)
    compute(other, TEXT[:PAGE])
    other.publish(TEXT, None)
    first.publish(TEXT, None)
    return first, fork, other


def test_a_page_that_a_fork_holds_is_published_after_no_page_that_the_fork_does_not_hold(pages: Pages) -> None:
    """What lies above a held page would be idle, and evicted before it."""
    first, fork, other = beside_a_fork(pages)
    first.free()
    other.free()
    pages.pool.limit(4)
    compute(pages.cache(), [90] * 2 * PAGE)
    assert tokens_in(fork) == TEXT[: 2 * PAGE]


def test_pages_are_published_once_no_fork_holds_them(pages: Pages) -> None:
    first, fork, other = beside_a_fork(pages)
    fork.free()
    first.publish(TEXT, None)
    late = pages.cache()
    late.adopt(TEXT, None)
    assert tokens_in(late) == TEXT[: 2 * PAGE]
    check_integrity(pages.pool, [first, other, late])
