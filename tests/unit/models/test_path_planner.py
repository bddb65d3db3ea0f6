"""The arrays of native attention: every row's path is that of its tree."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from attention_paths_reference import path_of
from forerun.kernels.cpu.page_layout import PAGE
from forerun.kernels.partition import AttentionShape, PathPlan
from forerun.kv_cache import PagedCache
from forerun.models import Rows
from forerun.models.attention.base import LayerAttention
from forerun.models.attention.native import PathPlanner
from forerun.models.attention.reference import SegmentPlanner
from forerun.models.model import lay_out
from forerun.utils.tree import Tree

LAYERS = [LayerAttention(1, 1, 4, 4, AttentionShape(0.5))]


@pytest.fixture
def planner() -> PathPlanner:
    return PathPlanner(LAYERS, torch.float32)


def prefilled(planner: PathPlanner, length: int) -> PagedCache:
    cache = planner.new_cache()
    cache.feed(range(-1, length - 1))
    cache.commit(range(length))
    return cache


def plan_of(planner: PathPlanner, batch: list[Rows]) -> PathPlan:
    """Return the plan after checking its form, and each row's path against the cache's scratch."""
    layout = lay_out(batch, planner)
    plan = layout.plan
    assert isinstance(plan, PathPlan)
    paths, n = plan.paths, layout.num_new
    arrays = (paths.sequence, paths.position, paths.slot, paths.prefix, paths.tail_start, paths.tail, plan.page_start)
    assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in arrays)
    assert [len(array) for array in arrays[:5]] == [n, n, n, n, n + 1] and paths.tail_start[-1] == len(paths.tail)
    assert layout.num_rows == n == sum(len(rows.token_ids) for rows in batch)
    row = 0
    for sequence, rows in enumerate(batch):
        cache = rows.cache
        assert isinstance(cache, PagedCache)
        own = plan.pages[plan.page_start[sequence] : plan.page_start[sequence + 1]]
        assert own.tolist() == [page.data_ptr() for page in cache.pages]
        for node in range(cache.num_scratch - len(rows.token_ids), cache.num_scratch):
            expected = [
                *range(cache.length),
                *(cache.length + i for i in Tree(parents=cache.scratch_parents).path_to(node)),
            ]
            assert path_of(paths, row) == expected
            assert (paths.sequence[row], paths.slot[row]) == (sequence, cache.length + node)
            assert paths.position[row] == layout.positions[row] == len(expected) - 1
            row += 1
    assert plan.page_start[-1] == len(plan.pages) and row == n
    return plan


@pytest.mark.parametrize("length", [0, 1, PAGE - 2, PAGE, 3 * PAGE + 1])
def test_a_chain_has_prefixes_alone(planner: PathPlanner, length: int) -> None:
    cache = prefilled(planner, length)
    for n in (1, 4, 70):  # over several forwards, without a commit
        paths = plan_of(planner, [Rows(cache, [0] * n)]).paths
        assert np.array_equal(paths.prefix, paths.slot + 1) and len(paths.tail) == 0


def test_the_stem_of_a_tree_belongs_to_the_prefixes(planner: PathPlanner) -> None:
    paths = plan_of(planner, [Rows(prefilled(planner, 10), [0] * 7, [-1, 0, 1, 1, 3, 0, 2])]).paths
    assert paths.prefix.tolist() == [11, 12, 13, 12, 12, 11, 13]
    assert paths.tail.tolist() == [13, 13, 14, 15, 16]


@pytest.mark.parametrize("seed", range(20))
def test_trees_over_several_forwards_beside_chains_and_prompts(planner: PathPlanner, seed: int) -> None:
    rng = random.Random(seed)
    caches = [prefilled(planner, rng.choice((0, 3, 60, 64, 130))) for _ in range(3)]
    for _ in range(3):
        batch = [Rows(planner.new_cache(), [0] * rng.choice((1, 80)), num_logits=0)]
        for cache in rng.sample(caches, rng.randrange(1, 4)):
            first, n = cache.num_scratch, rng.choice((1, 2, 9))
            tree = [rng.randrange(max(-1, i - 4), i) for i in range(first, first + n)]
            batch.append(Rows(cache, [0] * n, rng.choice((None, tree))))
        rng.shuffle(batch)
        plan_of(planner, batch)


def test_wanted_rows_are_not_padded(planner: PathPlanner) -> None:
    layout = lay_out([Rows(planner.new_cache(), [5, 6, 7], num_logits=1)], planner)
    assert layout.logit_rows is not None
    assert (layout.token_ids.tolist(), layout.logit_rows.tolist(), layout.num_logits) == ([5, 6, 7], [2], 1)


def test_a_cache_of_another_kind_is_refused(planner: PathPlanner) -> None:
    other = SegmentPlanner(LAYERS, torch.float32, torch.device("cpu"))
    for cache, planned in ((other.new_cache(), planner), (planner.new_cache(), other)):
        with pytest.raises(TypeError, match=type(cache).__name__):
            lay_out([Rows(cache, [1])], planned)
