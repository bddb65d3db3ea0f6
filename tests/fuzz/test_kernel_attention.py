"""Native attention of any shape: near its definition, and a row's bits depend on the row's own path alone."""

from __future__ import annotations

import random

import torch
from hypothesis import given, strategies as st

from forerun.kernels.cpu.library import Library
from forerun.kernels.cpu.page_layout import CACHE_FORMATS
from forerun.kernels.partition import AttentionShape
from forerun.kv_cache import PagedCache
from forerun.models.base import Rows
from fuzzing import examples
from kernel_cases import NUM_TOKENS, Attending, drawn, each_set, threads


def spoil(attending: Attending, cache: PagedCache) -> None:
    """NaN in all slots beyond the sequence, as a forward that failed leaves them."""
    end = 64 * len(cache.pages)
    if cache.length < end:
        beyond = range(cache.length, end)
        keys, values = (torch.full((attending.heads[1], len(beyond), n), torch.nan) for n in attending.widths)
        attending.planner.layout.write(cache.pages, 1, beyond, keys, values)


def path_to(node: int, parents: list[int]) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


@st.composite
def forms(draw: st.DrawFn, heads: int) -> AttentionShape:
    return AttentionShape(
        scale=draw(st.sampled_from([0.1, 0.35, 1.0])),
        window=draw(st.sampled_from([None, 1, 7, 37, 90])),
        softcap=draw(st.sampled_from([None, None, 0.5, 30.0])),
        sinks=drawn(heads, seed=draw(st.integers(0, 99))) * 2 if draw(st.booleans()) else None,
    )


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, int], tuple[int, int], AttentionShape]:
    kv_heads = draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 5))
    return (heads, kv_heads), (draw(st.integers(1, 70)), draw(st.integers(1, 70))), draw(forms(heads))


@given(
    shape=shapes(),
    dtype=st.sampled_from(list(CACHE_FORMATS)),
    length=st.one_of(st.integers(0, 3), st.integers(0, 200), st.sampled_from([62, 63, 64, 127])),
    n=st.one_of(st.integers(1, 64), st.integers(5, 20)),
    reach=st.sampled_from([0, 1, 2, 64]),
    seed=st.integers(0, 1 << 30),
)
@examples(6)
def test_attention(
    shape: tuple[tuple[int, int], tuple[int, int], AttentionShape],
    dtype: torch.dtype,
    length: int,
    n: int,
    reach: int,
    seed: int,
    native_library: Library,
) -> None:
    heads, widths, form = shape
    rng = random.Random(seed)
    attending = Attending(native_library, form, dtype, heads, widths)
    prompt, tokens = ([rng.randrange(NUM_TOKENS) for _ in range(count)] for count in (length, n))
    parents = [max(-1, i - 1 - rng.randint(0, reach)) for i in range(n)]
    node = rng.randrange(n)
    path = path_to(node, parents)
    for name in each_set(native_library):
        cache, others = attending.sequence(prompt), [attending.sequence(range(rng.randrange(90))) for _ in range(2)]
        spoil(attending, cache)
        batch = [Rows(others[0], [1] * rng.randint(1, 9)), Rows(cache, tokens, parents), Rows(others[1], [2, 3])]
        first = len(batch[0].token_ids)
        expected = attending.reference(batch)
        together = attending.forward(batch)
        torch.testing.assert_close(together, expected, rtol=1e-5, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")
        rows = together[first : first + n]
        for each in (cache, *others):
            each.drop()
        for count in (1, 2):
            with threads(count):
                spoil(attending, cache)
                assert torch.equal(attending.forward([Rows(cache, tokens, parents)]), rows), (name, count)
                cache.drop()
                alone = attending.sequence(prompt)  # the path to one node, row by row
                for row in path:
                    assert torch.equal(attending.forward([Rows(alone, [tokens[row]])])[0], rows[row]), (name, count)
                    alone.commit([0])
        attending.forward([Rows(cache, tokens, parents)])
        cache.commit(path)
        after = [attending.forward([Rows(each, [9])]) for each in (cache, alone)]
        assert torch.equal(*after), name
