"""The definition of native attention against the PyTorch reference that serves models, and against Transformers."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from attention_paths_reference import attend_paths, rotate
from forerun.kernels.cpu.page_layout import PAGE
from forerun.kernels.partition import AttentionShape, PathPlan
from forerun.models import Rows
from forerun.models.attention.base import LayerAttention
from forerun.models.attention.native import PathPlanner
from forerun.models.attention.reference import ReferenceAttention, SegmentPlanner
from forerun.models.model import lay_out

KV_HEADS = 2
CPU = torch.device("cpu")


def attend(
    planner: PathPlanner, rows: list[Rows], given: tuple[Tensor, Tensor, Tensor], form: AttentionShape
) -> Tensor:
    """Return the attention of layer 1, [rows, H * D_v]."""
    plan = lay_out(rows, planner).plan
    assert isinstance(plan, PathPlan)
    pages = [each.cache.pages for each in rows]
    return attend_paths(*given, plan.paths, pages, planner.layout, 1, form).flatten(1)


@pytest.mark.parametrize("seed", range(8))
def test_agrees_with_the_reference_that_serves_models(seed: int) -> None:
    """Compare chains, prompts and trees of two sequences in one forward, after prefixes of up to three pages."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    group, width, value_width = rng.choice(((1, 16, 16), (3, 8, 20), (2, 6, 5)))
    sinks = torch.randn(group * KV_HEADS, generator=generator) if seed % 3 == 0 else None
    form = AttentionShape(width**-0.5, rng.choice((None, 1, 7, 100)), rng.choice((None, 5.0)), sinks)
    layers = [LayerAttention(KV_HEADS, group, width, value_width, form)] * 2
    planners = SegmentPlanner(layers, torch.float32, CPU), PathPlanner(layers, torch.float32)
    caches = [[planner.new_cache() for planner in planners] for _ in range(2)]
    prompts = [rng.choice((1, PAGE - 1, 2 * PAGE + 3)) for _ in caches]
    trees = [[rng.randrange(max(-1, i - 3), i) for i in range(n)] for n in (3, 17)]
    for parents in ([None, None], trees, [[1, 3], None]):
        counts = prompts if parents == [None, None] else [len(each) if each else 2 for each in parents]
        total = sum(counts)
        query = torch.randn(total, group * KV_HEADS, width, generator=generator)
        key = torch.randn(total, KV_HEADS, width, generator=generator)
        value = torch.randn(total, KV_HEADS, value_width, generator=generator)
        batches = [
            [Rows(pair[kind], [0] * n, each) for pair, n, each in zip(caches, counts, parents)] for kind in range(2)
        ]
        layout = lay_out(batches[0], planners[0])
        padded = [torch.cat([t, t[-1:].expand(layout.num_rows - total, -1, -1)]) for t in (query, key, value)]
        expected = ReferenceAttention(torch.float32).forward(1, *padded, layout, form)[:total]
        torch.testing.assert_close(attend(planners[1], batches[1], (query, key, value), form), expected)
        for pair, n in zip(caches, counts):
            for cache in pair if parents == [None, None] else ():
                cache.commit(range(n))


def test_numbers_are_rounded_to_the_format_of_the_pages() -> None:
    form = AttentionShape(0.25)
    layers = [LayerAttention(KV_HEADS, 1, 16, 16, form)] * 2
    given = torch.randn(3, 5, KV_HEADS, 16, generator=torch.Generator().manual_seed(0))
    query, key, value = given
    narrow, wide = PathPlanner(layers, torch.bfloat16), PathPlanner(layers, torch.float32)
    rounded = (query, key.bfloat16().float(), value.bfloat16().float())
    mixed = attend(narrow, [Rows(narrow.new_cache(), [0] * 5)], (query, key, value), form)
    assert torch.equal(mixed, attend(wide, [Rows(wide.new_cache(), [0] * 5)], rounded, form))
    assert not torch.equal(mixed, attend(wide, [Rows(wide.new_cache(), [0] * 5)], (query, key, value), form))


def test_rotation_is_that_of_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(5, 4, 8, generator=generator), torch.randn(5, 2, 8, generator=generator)
    angles = torch.outer(torch.arange(20.0), torch.tensor([1.0, 0.3, 0.1, 0.03]))
    cos, sin, position = angles.cos(), angles.sin(), torch.tensor([0, 7, 7, 19, 3])
    doubled = [torch.cat([table[position]] * 2, -1)[None] for table in (cos, sin)]
    expected = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], *doubled)
    for x, turned in zip((query, key), expected):
        torch.testing.assert_close(rotate(x, position, (cos, sin)), turned[0].transpose(0, 1))


def test_keys_are_stored_rotated() -> None:
    form = AttentionShape(0.25)
    planner = PathPlanner([LayerAttention(KV_HEADS, 1, 16, 16, form)], torch.float32)
    query, key, value = torch.randn(3, 4, KV_HEADS, 16, generator=torch.Generator().manual_seed(0))
    angles = torch.rand(4, 8, generator=torch.Generator().manual_seed(1))
    rotation, position = (angles.cos(), angles.sin()), torch.arange(4)
    cache, other = planner.new_cache(), planner.new_cache()
    plans = [lay_out([Rows(each, [0] * 4)], planner).plan for each in (cache, other)]
    paths = plans[0].paths
    mixed = attend_paths(query, key, value, paths, [cache.pages], planner.layout, 0, form, rotation)
    turned = rotate(query, position, rotation), rotate(key, position, rotation)
    assert torch.equal(mixed, attend_paths(*turned, value, paths, [other.pages], planner.layout, 0, form))
    assert torch.equal(cache.read(0)[0], turned[1].transpose(0, 1))
