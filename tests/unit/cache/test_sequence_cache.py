import pytest
import torch

from forerun.cache import SequenceCache
from forerun.kernels.partition import KV_BLOCK

HEADS, WIDTH, LAYERS = 2, 4, 3


def write(cache: SequenceCache, marks: list[float]) -> None:
    """New rows whose keys are the marks and whose values are their negatives, plus the layer's index."""
    first = cache.num_scratch
    cache.feed(range(first - 1, first + len(marks) - 1))
    column = torch.tensor(marks, dtype=torch.float64).view(1, -1, 1).expand(HEADS, -1, WIDTH)
    for layer in range(LAYERS):
        cache.write(layer, first, column + layer / 10, -column - layer / 10)


def held(cache: SequenceCache) -> list[float]:
    """The committed rows' marks, checked to agree in every layer, head and lane, in keys and values."""
    length = cache.length
    marks = cache.keys[0][0, :length, 0]
    for layer in range(LAYERS):
        expected = (marks + layer / 10).view(1, -1, 1).expand(HEADS, -1, WIDTH)
        torch.testing.assert_close(cache.keys[layer][:, :length], expected)
        torch.testing.assert_close(cache.values[layer][:, :length], -expected)
    return marks.tolist()


def test_commits_a_prefix_and_forgets_the_rest() -> None:
    cache = SequenceCache(torch.float64)
    write(cache, [1, 2, 3, 4])
    cache.commit([0, 1])
    write(cache, [5, 6])
    cache.commit([0, 1])
    assert held(cache) == [1, 2, 5, 6]


@pytest.mark.parametrize("start", [3, KV_BLOCK - 2, KV_BLOCK])
def test_commits_a_path_through_a_tree(start: int) -> None:
    cache = SequenceCache(torch.float64)
    write(cache, list(range(start)))
    cache.commit(range(start))
    write(cache, [100, 101, 102, 103, 104, 105])
    cache.commit([0, 2, 3, 5])
    assert held(cache) == [*range(start), 100, 102, 103, 105]


def test_growth_keeps_what_was_committed() -> None:
    cache = SequenceCache(torch.float64)
    for start in range(0, 3 * KV_BLOCK, 100):
        write(cache, list(range(start, start + 100)))
        cache.commit(range(100))
    assert held(cache) == list(range(cache.length))


def test_capacity_doubles_so_that_growth_does_not_copy_at_every_step() -> None:
    cache = SequenceCache(torch.float64)
    storages = set()
    for position in range(5 * KV_BLOCK):
        write(cache, [position])
        cache.commit([0])
        storages.add(cache.keys[0].data_ptr())
    assert len(storages) <= 4


def test_truncate_and_rewrite() -> None:
    cache = SequenceCache(torch.float64)
    write(cache, [1, 2, 3])
    cache.commit(range(3))
    cache.truncate(1)
    write(cache, [9])
    cache.commit([0])
    assert held(cache) == [1, 9]
    with pytest.raises(ValueError, match="truncate"):
        cache.truncate(3)


def test_scratch_is_finite_and_memory_is_given_back() -> None:
    cache = SequenceCache(torch.float32)
    write(cache, [1])
    assert all(bool(t.isfinite().all()) for t in (*cache.keys, *cache.values))
    assert cache.nbytes == LAYERS * 2 * HEADS * KV_BLOCK * WIDTH * 4
    cache.free()
    assert cache.nbytes == 0
    assert cache.length == 0


def test_layers_come_in_order() -> None:
    cache = SequenceCache(torch.float32)
    cache.feed([-1])
    row = torch.ones(HEADS, 1, WIDTH)
    with pytest.raises(ValueError, match="layer 1"):
        cache.write(1, 0, row, row)


def test_scratch_accumulates_until_it_is_committed() -> None:
    cache = SequenceCache(torch.float64)
    start = KV_BLOCK - 2
    write(cache, list(range(start)))
    cache.commit(range(start))
    for step in range(4):
        assert (cache.length, cache.num_scratch) == (start, step)
        write(cache, [100 + step])
    cache.commit([0, 2, 3])
    assert held(cache) == [*range(start), 100, 102, 103]
    assert cache.num_scratch == 0


def test_what_is_dropped_is_written_over() -> None:
    cache = SequenceCache(torch.float64)
    write(cache, [1, 2, 3])
    cache.drop(keep=1)
    assert cache.num_scratch == 1
    write(cache, [7])
    cache.commit([0, 1])
    write(cache, [8, 9])
    cache.drop()
    assert cache.num_scratch == 0 and held(cache) == [1, 7]


def test_a_truncated_cache_holds_no_scratch() -> None:
    cache = SequenceCache(torch.float64)
    write(cache, [1, 2])
    cache.commit([0, 1])
    write(cache, [3])
    cache.truncate(2)
    assert cache.num_scratch == 0 and held(cache) == [1, 2]


@pytest.mark.parametrize("parents", [[0], [-2], [-1, 1], [-1, 0, 5]])
def test_a_row_follows_one_that_is_there(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="cannot follow"):
        SequenceCache(torch.float64).feed(parents)


def test_paths_move_again_after_growth_and_new_layers() -> None:
    """Values narrower than keys, and a layer that comes after the first move."""
    cache = SequenceCache(torch.float32)
    expected: list[float] = []
    for step in range(150):
        cache.feed(range(-1, 8))
        rows = (torch.arange(9.0) + 10 * step).view(1, -1, 1).expand(HEADS, -1, WIDTH)
        for layer in range(2 if step < 3 else LAYERS):
            cache.write(layer, 0, rows + 0.25 * layer, -rows[..., :2])
        kept = ([0, 1, 4, 8], [2, 3, 7], [0, 1, 2], [8])[step % 4]
        cache.commit(kept)
        expected += [row + 10 * step for row in kept]
        for layer in range(len(cache.keys)):
            # the last layer's first ten positions were never written
            known = slice(0 if layer < 2 else 10, cache.length)
            wanted = torch.tensor(expected)[known].view(1, -1, 1).expand(HEADS, -1, WIDTH)
            assert torch.equal(cache.keys[layer][:, known], wanted + 0.25 * layer)
            assert torch.equal(cache.values[layer][:, known], -wanted[..., :2])
    assert cache.length == len(expected) > KV_BLOCK
    assert cache.nbytes == LAYERS * HEADS * (WIDTH + 2) * 4 * 2 * KV_BLOCK
