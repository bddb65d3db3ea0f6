"""Attention over pages against its definition; a row's bits depend on its own path alone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from forerun.models.base import Rows
from triton_rig import DTYPES, INTERPRETED, MARKS, NUM_TOKENS, Attending, close

pytestmark = MARKS
TREE = [-1, 0, 0, 1, 1, 2, 4, -1, 6]
WINDOWS = [None, 24, 300]


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, NUM_TOKENS, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS)
def test_chains_trees_and_prompts_are_what_the_definition_says(window: int | None, dtype: torch.dtype) -> None:
    rig = Attending(window, dtype)
    lengths = (0, 61, 250, 520)
    batch = [
        Rows(rig.sequence(tokens(length, length)), tokens(len(parents or [0] * 3), 9), parents)
        for length, parents in zip(lengths, (None, TREE, TREE, None), strict=True)
    ]
    expected = rig.reference(batch)
    close(rig.forward(batch), expected, dtype)


@pytest.mark.parametrize(("heads", "width"), [((4, 4), 16), ((8, 1), 32), ((15, 5), 64)])
def test_shapes_of_heads(heads: tuple[int, int], width: int) -> None:
    rig = Attending(heads=heads, width=width)
    batch = [Rows(rig.sequence(tokens(70)), tokens(4))]
    expected = rig.reference(batch)
    close(rig.forward(batch), expected, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS[:2])
def test_a_row_alone_is_that_row_in_any_company(window: int | None, dtype: torch.dtype) -> None:
    """Compare over a border of a split; the other rows of the second run hold NaN."""
    rig = Attending(window, dtype)
    own, cache = tokens(12, 5), rig.sequence(tokens(250))
    together = rig.forward([Rows(cache, own)])
    cache.drop()
    alone = torch.cat([rig.forward([Rows(cache, [token])]) for token in own])
    assert torch.equal(alone, together)
    cache.drop()
    beside = rig.forward([Rows(rig.sequence(tokens(64)), tokens(3)), Rows(cache, own), Rows(rig.sequence([]), own)])
    assert torch.equal(beside[3:15], together)
    cache.drop()
    spoilt = list(own)
    rig.numbers[spoilt[9]] = float("nan")
    assert spoilt.index(spoilt[9]) == 9
    after = rig.forward([Rows(cache, spoilt)], num_programs=5)
    assert torch.equal(after[:9], together[:9])
    assert after[9].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [30, 252, 190])
def test_a_path_through_a_tree_has_the_bits_of_a_chain(length: int, dtype: torch.dtype) -> None:
    rig = Attending(dtype=dtype)
    cache = rig.sequence(tokens(length))
    nodes, path = tokens(len(TREE), 3), [0, 1, 4, 6, 8]
    in_tree = rig.forward([Rows(cache, nodes, TREE)])[path]
    cache.drop()
    in_chain = rig.forward([Rows(cache, [nodes[node] for node in path])])
    assert torch.equal(in_tree, in_chain)


def test_a_branch_that_leaves_a_stem_before_the_page_in_which_the_stem_ends() -> None:
    rig = Attending()
    cache, nodes = rig.sequence(tokens(60)), tokens(10, 3)
    in_tree = rig.forward([Rows(cache, nodes, [-1, 0, 1, 2, 3, 4, 5, 6, 1, 8])])
    cache.drop()
    for path in (range(8), (0, 1, 8, 9)):
        assert torch.equal(in_tree[list(path)], rig.forward([Rows(cache, [nodes[node] for node in path])]))
        cache.drop()


@pytest.mark.parametrize("count", [1, 63, 64, 65, 128] if INTERPRETED else range(1, 130))
def test_every_border_of_pages(count: int) -> None:
    """Check every border; slots that were not written hold NaN (`Attending.sequence`)."""
    rig = Attending()
    batch = [Rows(rig.sequence(tokens(count)), tokens(2, 8))]
    expected = rig.reference(batch)
    close(rig.forward(batch), expected, torch.float32)


def test_a_forward_of_more_rows_than_a_bucket_is_cut() -> None:
    rig = Attending()
    whole, parts = rig.planner.new_cache(), rig.planner.new_cache()
    given = tokens(290)
    rig.forward([Rows(whole, given)])
    whole.commit(range(290))
    for size in (200, 90):
        rig.forward([Rows(parts, given[parts.length : parts.length + size])])
        parts.commit(range(size))
    for own, expected in zip(parts.read(1), whole.read(1), strict=True):
        assert torch.equal(own, expected)
    last = tokens(1, 4)
    assert torch.equal(rig.forward([Rows(parts, last)]), rig.forward([Rows(whole, last)]))
