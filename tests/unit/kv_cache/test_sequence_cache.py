"""The contract of a sequence's cache, of both kinds: what is committed stays, whatever was fed beside it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings, strategies as st

from forerun.kernels.cpu.page_layout import PAGE, PageLayout
from forerun.kernels.partition import KV_BLOCK
from forerun.kernels.quantize import quantize_symmetric
from forerun.kv_cache import PagedCache, PagePool, SequenceCache
from forerun.kv_cache.contiguous import ContiguousCache, bytes_per_page

HEADS, WIDTH, LAYERS = 2, 4, 3
Make = Callable[[Sequence[tuple[int, int, int]]], SequenceCache]


def paged(dtype: torch.dtype) -> Make:
    def make(shapes: Sequence[tuple[int, int, int]]) -> SequenceCache:
        layout = PageLayout(shapes, dtype)
        return PagedCache(PagePool(layout.nbytes, layout.new_page), layout)

    return make


def contiguous(shapes: Sequence[tuple[int, int, int]]) -> SequenceCache:
    return ContiguousCache(PagePool(bytes_per_page(shapes, torch.float32)), shapes, torch.float32)


KINDS: dict[str, Make] = {
    "contiguous": contiguous,
    "paged": paged(torch.float32),
    "paged bfloat16": paged(torch.bfloat16),
    "paged int8": paged(torch.int8),
}


@pytest.fixture(params=["contiguous", "paged"])
def cache(request: pytest.FixtureRequest) -> SequenceCache:
    return KINDS[request.param]([(HEADS, WIDTH, WIDTH)] * LAYERS)


def write(cache: SequenceCache, marks: Sequence[float]) -> None:
    """New rows whose keys are the marks and whose values are their negatives, plus the layer's index."""
    first = cache.num_scratch
    cache.feed(range(first - 1, first + len(marks) - 1))
    column = torch.tensor(marks, dtype=torch.float32).view(1, -1, 1).expand(HEADS, -1, WIDTH)
    for layer in range(LAYERS):
        cache.write(layer, first, column + layer / 8, -column - layer / 8)


def held(cache: SequenceCache) -> list[float]:
    """The committed rows' marks, checked to agree in every layer, head and lane, in keys and values."""
    length = cache.length
    marks = cache.read(0)[0][0, :length, 0]
    for layer in range(LAYERS):
        keys, values = cache.read(layer)
        expected = (marks + layer / 8).view(1, -1, 1).expand(HEADS, -1, WIDTH)
        assert torch.equal(keys[:, :length], expected)
        assert torch.equal(values[:, :length], -expected)
    return marks.tolist()


def test_commits_a_prefix_and_forgets_the_rest(cache: SequenceCache) -> None:
    write(cache, [1, 2, 3, 4])
    cache.commit([0, 1])
    write(cache, [5, 6])
    cache.commit([0, 1])
    assert held(cache) == [1, 2, 5, 6]


@pytest.mark.parametrize("start", [3, KV_BLOCK - 2, KV_BLOCK])
def test_commits_a_path_through_a_tree(cache: SequenceCache, start: int) -> None:
    write(cache, list(range(start)))
    cache.commit(range(start))
    write(cache, [100, 101, 102, 103, 104, 105])
    cache.commit([0, 2, 3, 5])
    assert held(cache) == [*range(start), 100, 102, 103, 105]


def test_growth_keeps_what_was_committed(cache: SequenceCache) -> None:
    for start in range(0, 3 * KV_BLOCK, 100):
        write(cache, list(range(start, start + 100)))
        cache.commit(range(100))
    assert held(cache) == list(range(cache.length))


def test_truncate_and_rewrite(cache: SequenceCache) -> None:
    write(cache, [1, 2, 3])
    cache.commit(range(3))
    cache.truncate(1)
    write(cache, [9])
    cache.commit([0])
    assert held(cache) == [1, 9]
    with pytest.raises(ValueError, match="truncate"):
        cache.truncate(3)


def test_a_freed_cache_begins_anew(cache: SequenceCache) -> None:
    write(cache, [])
    write(cache, [1, 2])
    cache.commit([0])
    assert cache.nbytes > 0
    cache.free()
    assert (cache.nbytes, cache.length, cache.num_scratch) == (0, 0, 0)
    write(cache, [5])
    cache.commit([0])
    assert held(cache) == [5]


def test_scratch_accumulates_until_it_is_committed(cache: SequenceCache) -> None:
    start = KV_BLOCK - 2
    write(cache, list(range(start)))
    cache.commit(range(start))
    for step in range(4):
        assert (cache.length, cache.num_scratch) == (start, step)
        write(cache, [100 + step])
    cache.commit([0, 2, 3])
    assert held(cache) == [*range(start), 100, 102, 103]
    assert cache.num_scratch == 0


def test_what_is_dropped_is_written_over(cache: SequenceCache) -> None:
    write(cache, [1, 2, 3])
    cache.drop(keep=1)
    assert cache.num_scratch == 1
    write(cache, [7])
    cache.commit([0, 1])
    write(cache, [8, 9])
    cache.drop()
    assert cache.num_scratch == 0 and held(cache) == [1, 7]


def test_a_truncated_cache_holds_no_scratch(cache: SequenceCache) -> None:
    write(cache, [1, 2])
    cache.commit([0, 1])
    write(cache, [3])
    cache.truncate(2)
    assert cache.num_scratch == 0 and held(cache) == [1, 2]


@pytest.mark.parametrize("parents", [[0], [-2], [-1, 1], [-1, 0, 5]])
def test_a_row_follows_one_that_is_there(cache: SequenceCache, parents: list[int]) -> None:
    with pytest.raises(ValueError, match="cannot follow"):
        cache.feed(parents)
    assert cache.num_scratch == cache.nbytes == 0


def beside(cache: SequenceCache) -> SequenceCache:
    """Another cache of the same pool."""
    if isinstance(cache, PagedCache):
        return PagedCache(cache.pool, cache._layout)
    return ContiguousCache(cache.pool, cache.shapes, cache.dtype)


def taken_over(cache: SequenceCache, tokens: list[int], tenant: str | None = None) -> list[int]:
    """What another cache finds of these tokens."""
    other = beside(cache)
    other.adopt(tokens, tenant)
    found = held(other) if other.length else []
    other.free()
    return [int(mark) for mark in found]


@pytest.mark.parametrize("length", [0, 1, PAGE - 1, PAGE, PAGE + 20, 2 * PAGE, 3 * PAGE])
def test_what_follows_a_cut_is_published_like_anything_else(cache: SequenceCache, length: int) -> None:
    cache.pool.limit(100)  # without a bound, what nobody holds goes before memory is allocated
    old, new = list(range(3 * PAGE)), [*range(length), *range(300, 300 + 3 * PAGE)]
    write(cache, old)
    cache.commit(range(len(old)))
    cache.publish(old, None)
    cache.truncate(length)
    write(cache, new[length:])
    cache.commit(range(len(new) - length))
    cache.publish(new, None)
    assert taken_over(cache, [*new, 0]) == new[: len(new) // PAGE * PAGE]
    assert taken_over(cache, [*old, 0]) == old


@pytest.mark.parametrize("count", [0, 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 3 * PAGE])
def test_all_whole_pages_are_taken_over_but_for_the_last_token(cache: SequenceCache, count: int) -> None:
    """From which the next one is computed."""
    tokens = list(range(3 * PAGE))
    write(cache, tokens)
    cache.commit(range(len(tokens)))
    cache.publish(tokens, None)
    assert taken_over(cache, tokens[:count]) == tokens[: max(0, count - 1) // PAGE * PAGE]


@pytest.mark.parametrize("place", [0, 1, PAGE - 1, PAGE, 2 * PAGE - 1])
def test_a_page_is_found_by_all_of_its_tokens(cache: SequenceCache, place: int) -> None:
    tokens = list(range(2 * PAGE))
    write(cache, tokens)
    cache.commit(range(len(tokens)))
    cache.publish(tokens, None)
    other = [*tokens[:place], 999, *tokens[place + 1 :], 0]
    assert taken_over(cache, other) == tokens[: place // PAGE * PAGE]


@pytest.mark.parametrize("named", [PAGE - 1, PAGE, 2 * PAGE, 2 * PAGE + 5, 3 * PAGE])
@pytest.mark.parametrize("committed", [PAGE - 1, PAGE, 2 * PAGE - 1, 2 * PAGE])
def test_published_is_what_is_named_and_committed(cache: SequenceCache, committed: int, named: int) -> None:
    """Not the scratch, which may hold something else than the tokens that follow. What is named later comes later."""
    tokens = list(range(3 * PAGE))
    write(cache, tokens[:committed])
    cache.commit(range(committed))
    write(cache, [500] * 2 * PAGE)
    cache.publish(tokens[:named], None)
    assert taken_over(cache, [*tokens, 0]) == tokens[: min(committed, named) // PAGE * PAGE]
    cache.publish(tokens, None)
    assert taken_over(cache, [*tokens, 0]) == tokens[: committed // PAGE * PAGE]


@pytest.mark.parametrize("length", [0, PAGE, PAGE + 20])
def test_what_is_published_for_one_tenant_no_other_finds(cache: SequenceCache, length: int) -> None:
    """Whatever the cache is told later: its pages are the first tenant's."""
    cache.pool.limit(100)
    tokens = list(range(2 * PAGE))
    write(cache, tokens)
    cache.commit(range(len(tokens)))
    cache.publish(tokens[:PAGE], "a")
    cache.truncate(length)
    write(cache, tokens[length:])
    cache.commit(range(len(tokens) - length))
    cache.publish(tokens, "b")
    assert taken_over(cache, [*tokens, 0], "a") == tokens[:PAGE]
    assert taken_over(cache, [*tokens, 0]) == []


class Lists:
    """What a cache must hold, as lists of marks: of the committed positions, and of the scratch with its parents."""

    def __init__(self) -> None:
        self.committed: list[int] = []
        self.scratch: list[int] = []
        self.parents: list[int] = []
        self.num_marks = self.most_slots = 0

    def feed(self, parents: list[int]) -> list[int]:
        marks = list(range(self.num_marks, self.num_marks + len(parents)))
        self.num_marks += len(parents)
        self.scratch += marks
        self.parents += parents
        self.most_slots = max(self.most_slots, len(self.committed) + len(self.scratch))
        return marks

    def path_to(self, node: int) -> list[int]:
        return [] if node < 0 else [*self.path_to(self.parents[node]), node]

    def end(self, path: Sequence[int] = ()) -> None:
        self.committed += [self.scratch[node] for node in path]
        self.scratch, self.parents = [], []


SHAPES = [(2, 5, 3), (2, 5, 3), (1, 16, 20), (3, 2, 2)]
"""Two layers alike, values of less than a vector, of more, and keys and values of one shape."""
STEPS = ["feed", "feed", "chain", "commit", "commit", "drop", "truncate", "free"]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(STEPS), max_size=14), st.integers(0, 2**32))
def test_holds_what_lists_hold(kind: str, steps: list[str], seed: int) -> None:
    cache, lists, rng = KINDS[kind](SHAPES), Lists(), random.Random(seed)
    for step in steps:
        take(step, cache, lists, rng)
        marks = [*lists.committed, *lists.scratch]
        assert (cache.length, cache.scratch_parents) == (len(lists.committed), lists.parents)
        if isinstance(cache, PagedCache):
            assert len(cache.pages) == -(-lists.most_slots // PAGE) == len(cache.addresses)
        for layer in range(len(SHAPES)) if marks else ():
            for stored, expected in zip(cache.read(layer), drawn(marks, layer, cache.dtype), strict=True):
                assert torch.equal(stored, expected)


def take(step: str, cache: SequenceCache, lists: Lists, rng: random.Random) -> None:
    """One step, in both alike."""
    if step in ("feed", "chain"):
        first = cache.num_scratch
        rows = range(first, first + rng.choice((1, 2, 5, 16, 70)))
        parents = [row - 1 if step == "chain" else rng.randrange(max(-1, row - 4), row) for row in rows]
        cache.feed(parents)
        marks = lists.feed(parents)
        for layer in range(len(SHAPES)):
            cache.write(layer, first, *drawn(marks, layer, torch.float32))
    elif step == "commit":
        path = lists.path_to(rng.randrange(-1, len(lists.scratch)))
        cache.commit(path)
        lists.end(path)
    elif step == "drop":
        keep = rng.randrange(len(lists.scratch) + 1)
        cache.drop(keep)
        del lists.scratch[keep:], lists.parents[keep:]
    elif step == "truncate":
        length = rng.randrange(len(lists.committed) + 1)
        cache.truncate(length)
        del lists.committed[length:]
        lists.end()
    else:
        cache.free()
        lists.committed, lists.most_slots = [], 0
        lists.end()


def drawn(marks: Sequence[int], layer: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Keys and values of one layer that belong to these marks, as a cache of this format gives them back."""
    heads, key_width, value_width = SHAPES[layer]
    numbers = torch.arange(heads * (key_width + value_width)).view(heads, 1, -1)
    rows = torch.sin(1.7 * numbers + 0.31 * torch.tensor(marks).view(1, -1, 1) + layer)
    parts = rows[..., :key_width], rows[..., key_width:]
    if dtype == torch.int8:
        return tuple(codes * scale for codes, scale in map(quantize_symmetric, parts))
    return tuple(part.to(dtype) for part in parts)
