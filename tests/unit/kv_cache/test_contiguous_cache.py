"""How a contiguous cache grows, and what lies in it where nothing was written."""

import torch

from forerun.kernels.partition import KV_BLOCK
from forerun.kv_cache import PagePool
from forerun.kv_cache.contiguous import ContiguousCache

HEADS, LAYERS = 2, 3
SHAPES = [(HEADS, 4, 2)] * LAYERS


def test_capacity_doubles_so_that_growth_does_not_copy_at_every_step() -> None:
    cache = ContiguousCache(PagePool(1), SHAPES, torch.float32)
    storages = set()
    for _ in range(5 * KV_BLOCK):
        cache.feed([-1])
        cache.commit([0])
        storages.add(cache.keys[0].data_ptr())
    assert len(storages) <= 4


def test_memory_is_finite_where_nothing_was_written() -> None:
    cache = ContiguousCache(PagePool(1), SHAPES, torch.float32)
    assert cache.nbytes == 0
    cache.feed([-1])
    assert all(bool(t.isfinite().all()) for t in (*cache.keys, *cache.values))
    assert cache.nbytes == LAYERS * HEADS * (4 + 2) * KV_BLOCK * 4
    cache.free()
    assert cache.nbytes == 0


def test_a_tree_that_fills_the_last_block_leaves_a_slot_that_no_row_sees() -> None:
    cache = ContiguousCache(PagePool(1), SHAPES, torch.float32)
    cache.feed([-1] * KV_BLOCK)
    assert cache.keys[0].shape[1] > KV_BLOCK
