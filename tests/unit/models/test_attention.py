"""Attention against a naive float64 oracle, and a row's bits in every batch composition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.kernels.partition import KV_BLOCK, AttentionShape
from forerun.kv_cache import PagePool
from forerun.kv_cache.contiguous import ContiguousCache
from forerun.models import Rows
from forerun.models.attention.base import LayerAttention
from forerun.models.attention.reference import ReferenceAttention, SegmentPlanner
from forerun.models.model import lay_out

KV_HEADS, WIDTH = 2, 16
SHAPES = [(KV_HEADS, WIDTH, WIDTH)]
CPU = torch.device("cpu")


def planner_of(group: int, form: AttentionShape, dtype: torch.dtype) -> SegmentPlanner:
    return SegmentPlanner([LayerAttention(KV_HEADS, group, WIDTH, WIDTH, form)], dtype, CPU)


def path_of(row: int, parents: list[int]) -> list[int]:
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def oracle(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    length: int,
    parents: list[int],
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention one row, one head, one sum at a time. query: [n, H, D]; keys, values: [length + n, H_kv, D]."""
    n, heads, width = query.shape
    out = torch.zeros(n, heads, width, dtype=query.dtype)
    for row in range(n):
        slots = [*range(length), *(length + node for node in path_of(row, parents))]
        if window is not None:
            slots = slots[-window:]
        for head in range(heads):
            kv = head // (heads // KV_HEADS)
            scores = keys[slots, kv] @ query[row, head] * width**-0.5
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1]])
            weights = torch.softmax(scores, 0)[: len(slots)]
            out[row, head] = weights @ values[slots, kv]
    return out.view(n, -1)


TREE = [-1, 0, 0, 1, 1, 2, 4]


@pytest.mark.parametrize("parents", [[-1, 0, 1, 2, 3], TREE, [-1]], ids=["chain", "tree", "single"])
@pytest.mark.parametrize("length", [0, 5, KV_BLOCK - 3, KV_BLOCK, 2 * KV_BLOCK + 40])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    ("window", "softcap", "sink"),
    [(None, None, False), (4, None, False), (300, 5.0, False), (None, None, True), (24, None, True)],
)
def test_matches_the_oracle(
    parents: list[int], length: int, group: int, window: int | None, softcap: float | None, sink: bool
) -> None:
    generator = torch.Generator().manual_seed(length + len(parents))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    n, heads = len(parents), group * KV_HEADS
    keys, values = normal(length + n, KV_HEADS, WIDTH), normal(length + n, KV_HEADS, WIDTH)
    query, sinks = normal(n, heads, WIDTH), normal(heads) if sink else None
    cache = ContiguousCache(PagePool(1), SHAPES, torch.float64)
    if length:
        cache.feed(range(-1, length - 1))
        cache.write(0, 0, keys[:length].transpose(0, 1), values[:length].transpose(0, 1))
        cache.commit(range(length))
    form = AttentionShape(WIDTH**-0.5, window, softcap, sinks)
    layout = lay_out([Rows(cache, [0] * n, parents)], planner_of(group, form, torch.float64))
    pad = layout.num_rows - n

    def padded(x: Tensor) -> Tensor:
        return torch.cat([x, x[-1:].expand(pad, -1, -1)]) if pad else x

    given = (padded(query), padded(keys[length:]), padded(values[length:]))
    result = ReferenceAttention(torch.float64).forward(0, *given, layout, form)
    expected = oracle(query, keys, values, length, parents, window, softcap, sinks)
    torch.testing.assert_close(result[:n], expected)


@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("window", [None, 40])
def test_a_row_has_the_same_bits_alone_together_and_in_company(group: int, window: int | None) -> None:
    total = KV_BLOCK + 60
    generator = torch.Generator().manual_seed(group)
    heads, form = group * KV_HEADS, AttentionShape(0.25, window)
    query = torch.randn(total, heads, WIDTH, generator=generator)
    keys, values = (torch.randn(total, KV_HEADS, WIDTH, generator=generator) for _ in range(2))

    def run(sizes: list[int], company: bool = False) -> Tensor:
        cache, out, done = ContiguousCache(PagePool(1), SHAPES, torch.float32), [], 0
        for size in sizes:
            span = slice(done, done + size)
            batch = [Rows(cache, [0] * size)]
            stranger = ContiguousCache(PagePool(1), SHAPES, torch.float32)
            if company:
                batch.insert(0, Rows(stranger, [0] * 3))
            layout = lay_out(batch, planner_of(group, form, torch.float32))
            rows = []
            for source in (query, keys, values):
                parts = [source[:3]] if company else []
                parts.append(source[span])
                packed = torch.cat(parts)
                rows.append(torch.cat([packed, packed[-1:].expand(layout.num_rows - len(packed), -1, -1)]))
            attended = ReferenceAttention(torch.float32).forward(0, *rows, layout, form)
            out.append(attended[3 if company else 0 :][:size])
            cache.commit(range(size))
            done += size
        return torch.cat(out)

    alone = run([1] * total)
    assert torch.equal(alone, run([total]))
    assert torch.equal(alone, run([5] * (total // 5) + [total % 5]))
    assert torch.equal(alone, run([100, 3, 150, 8, *[11] * 5]))
    assert torch.equal(alone, run([4] * (total // 4), company=True))
