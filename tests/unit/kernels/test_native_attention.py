"""Native attention: what it computes, and that a row's bits depend on its path alone."""

from __future__ import annotations

import pytest
import torch

from forerun.kernels.cpu.library import Library
from forerun.kernels.partition import AttentionShape
from forerun.models.base import Rows
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
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


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_a_rows_bits_are_the_same_alone_in_chains_trees_chunks_and_company(
    library: Library, form: str, num_threads: int
) -> None:
    with threads(num_threads):
        _compare(Attending(library, FORMS[form]))


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
