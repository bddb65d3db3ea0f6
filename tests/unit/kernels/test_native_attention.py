"""Native attention: what it computes, and that a row's bits depend on its path alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.kernels.cpu.library import Library
from forerun.kernels.cpu.page_layout import CACHE_FORMATS
from forerun.kernels.partition import AttentionShape
from forerun.models.base import Rows
from forerun.models.model import lay_out
from kernel_cases import NUM_TOKENS, THREADS, Attending, threads

FORMS = {
    "plain": AttentionShape(0.2),
    "window": AttentionShape(0.2, window=37),
    "softcap": AttentionShape(0.2, softcap=3.0),
    "sinks": AttentionShape(0.2, sinks=torch.linspace(-1, 1, 6)),
}
PREFIX = 122
"""Positions before the rows that are tried: these cross a page's border."""
TREE = (-1, 0, 0, 1, 1, 2, 3, 6, 7, 5, 0)


@pytest.mark.parametrize("dtype", CACHE_FORMATS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_attention_is_that_of_the_definition(library: Library, form: str, dtype: torch.dtype) -> None:
    attending = Attending(library, FORMS[form], dtype)
    long, short = attending.sequence(range(PREFIX)), attending.sequence(range(50, 60))
    batch = [
        Rows(short, [1, 2, 3]),
        Rows(long, list(range(100, 100 + len(TREE))), TREE),
        Rows(attending.planner.new_cache(), list(range(20))),
    ]
    expected = attending.reference(batch)
    torch.testing.assert_close(attending.forward(batch), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["sinks", "window"])
def test_a_path_of_many_parts(library: Library, form: str) -> None:
    attending = Attending(library, FORMS[form])
    cache = attending.sequence([i % NUM_TOKENS for i in range(2172)])  # node 4 begins the eighteenth part of 128
    batch = [Rows(cache, list(range(11)), [-1, 0, 1, 2, 3, 1, 5, 6, 7, 8, 0])]
    expected = attending.reference(batch)
    alone = attending.forward(batch)
    torch.testing.assert_close(alone, expected, rtol=1e-5, atol=1e-5)
    cache.drop()
    with threads(2):
        assert torch.equal(attending.forward(batch), alone)


@pytest.mark.parametrize("dtype", CACHE_FORMATS, ids=str)
def test_what_is_written_is_what_the_definition_writes(library: Library, dtype: torch.dtype) -> None:
    """To the last bit, in any row: of zeros, of numbers too small for a scale, with NaN and infinity."""
    attending = Attending(library, FORMS["plain"], dtype)
    query, keys, values = (numbers.contiguous() for numbers in attending.numbers(torch.arange(20)))
    keys[2, 1], values[3] = 0, 1e-39
    keys[4, 0, 5], values[5, 1, 39] = torch.nan, -torch.inf
    keys[6, 0, 47], values[7, 0, 17] = -3e38, 1e20
    cache = attending.planner.new_cache()
    layout = lay_out([Rows(cache, list(range(20)))], attending.planner)
    attending.attention.forward(1, query, keys, values, layout, attending.form)
    expected, pages = [page.clone().zero_() for page in cache.pages], attending.planner.layout
    pages.write(expected, 1, range(20), keys.transpose(0, 1), values.transpose(0, 1))
    for ours, theirs in zip(cache.read(1), pages.read(expected, 1, range(20)), strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("form", "dtype"), [*((form, torch.bfloat16) for form in FORMS), ("window", torch.int8)])
def test_a_rows_bits_are_the_same_alone_in_chains_trees_chunks_and_company(
    library: Library, form: str, dtype: torch.dtype, num_threads: int
) -> None:
    with threads(num_threads):
        _compare(Attending(library, FORMS[form], dtype))


def test_a_row_with_a_number_that_is_not_finite_spoils_its_descendants_alone(library: Library) -> None:
    attending = Attending(library, FORMS["plain"], torch.int8)
    cache = attending.sequence(range(70))
    layout = lay_out([Rows(cache, [1, 2, 3, 4, 5], [-1, 0, 1, 0, 3])], attending.planner)
    query, keys, values = attending.numbers(layout.token_ids)
    values[1, 0, 3] = torch.inf
    found = attending.attention.forward(1, query, keys, values, layout, attending.form).view(5, 2, -1)
    assert found[1:3, 0].isnan().all() and found[1:3, 1].isfinite().all()
    assert found[[0, 3, 4]].isfinite().all()


def between_powers_of_two() -> Tensor:
    """Return numbers whose exponential's power of 2 is rounded from a half, to even, which is nearer to 0."""
    halves, inverse = np.arange(0.5, 125, 2, np.float32), np.float32(1.44269504)
    guess = halves / inverse
    near = guess[:, None] + np.spacing(guess)[:, None] * np.arange(-3, 4, dtype=np.float32)
    return -torch.from_numpy(near[near * inverse == halves[:, None]])


def test_small_weights_have_all_their_digits(library: Library) -> None:
    scores = between_powers_of_two()
    assert len(scores) > 30
    attending = Attending(library, AttentionShape(1.0), torch.float32, heads=(1, 1), widths=(16, 16))
    layout = lay_out([Rows(attending.planner.new_cache(), [0, 1]) for _ in scores], attending.planner)
    query, keys, values = torch.zeros(3, 2 * len(scores), 1, 16)
    query[..., 0], keys[1::2, 0, 0], values[1::2] = 1, scores, 1
    found = attending.attention.forward(1, query, keys, values, layout, attending.form)[1::2]
    expected = scores.double().sigmoid().float()[:, None].expand_as(found)
    torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_a_query_that_is_no_number_has_no_attention(library: Library, form: str) -> None:
    attending = Attending(library, FORMS[form])
    layout = lay_out([Rows(attending.sequence(range(40)), [1, 2, 3])], attending.planner)
    query, keys, values = attending.numbers(layout.token_ids)
    query[1, 2] = torch.nan
    found = attending.attention.forward(1, query, keys, values, layout, attending.form).view(3, 6, -1)
    assert found[1, 2].isnan().all() and found.isnan().sum() == 40


@pytest.mark.parametrize("form", FORMS)
def test_bits_are_the_same_with_any_number_of_threads(library: Library, form: str) -> None:
    """Few groups of rows are shared among the threads in parts, many as wholes."""
    attending = Attending(library, FORMS[form])
    long = attending.sequence(range(PREFIX))
    few = [Rows(long, list(range(100, 100 + len(TREE))), TREE)]
    many = [*(Rows(attending.sequence(range(5 + 9 * i)), [i, i + 1]) for i in range(12)), *few]
    for batch in (few, many):
        found = []
        for count in THREADS:
            with threads(count):
                found.append(attending.forward(batch))
            for rows in batch:
                rows.cache.drop()
        assert all(torch.equal(each, found[0]) for each in found)


def _compare(attending: Attending) -> None:
    prompt, tokens = list(range(PREFIX)), list(range(200, 220))
    cache = attending.sequence(prompt)
    alone = []
    for token in tokens:
        alone.append(attending.forward([Rows(cache, [token])]))
        cache.commit([0])
    expected = torch.cat(alone)

    together = attending.sequence(prompt)
    assert torch.equal(attending.forward([Rows(together, tokens)]), expected)
    together.drop()
    chunks = [attending.forward([Rows(together, tokens[i : i + 3])]) for i in range(0, len(tokens), 3)]
    assert torch.equal(torch.cat(chunks), expected)

    # every other node lies on the path, each with a sibling before it
    nodes, parents, path = [tokens[0]], [-1], [0]
    for token in tokens[1:]:
        nodes += [7, token]
        parents += [path[-1], path[-1]]
        path.append(len(nodes) - 1)
    tree = attending.sequence(prompt)
    assert torch.equal(attending.forward([Rows(tree, nodes, parents)])[path], expected)
    tree.commit(path)
    follower = attending.forward([Rows(tree, [9])])

    crowd = [Rows(attending.sequence(range(5 + 9 * i)), [i, i + 1]) for i in range(9)]
    mixed = attending.forward([*crowd, Rows(attending.sequence(prompt), tokens)])
    assert torch.equal(mixed[18:], expected)
    together.commit(range(len(tokens)))
    assert torch.equal(attending.forward([Rows(together, [9])]), follower)
