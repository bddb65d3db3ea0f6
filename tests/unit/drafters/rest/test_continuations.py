"""Counts and the best nodes against counting every prefix."""

import random
from collections import Counter

import numpy as np
import pytest

from forerun.drafters.lookup.rest.index import ContinuationTree, best_nodes

END = 99


def naive(rows: list[list[int]], limit: int) -> list[tuple[tuple[int, ...], int]]:
    counts: Counter[tuple[int, ...]] = Counter()
    for row in rows:
        for size in range(1, len(row) + 1):
            if row[size - 1] == END:
                break
            counts[tuple(row[:size])] += 1
    return sorted(counts.items(), key=lambda item: (-item[1], len(item[0]), item[0]))[:limit]


def paths(found: ContinuationTree) -> list[tuple[int, ...]]:
    assert all(-1 <= parent < node for node, parent in enumerate(found.tree.parents))
    return [tuple(found.tree.ids[node] for node in path) for path in found.tree.paths()]


@pytest.mark.parametrize("values", [1, 2, 4, 50])
def test_against_counting(values: int) -> None:
    rng = random.Random(values)
    for _ in range(60):
        depth, m = rng.randint(1, 6), rng.randint(1, 30)
        rows = sorted([rng.choice([*range(values), END]) for _ in range(depth)] for _ in range(m))
        limit = rng.randint(1, 40)
        found = best_nodes(np.array(rows, dtype=np.int64), END, limit)
        expected = naive(rows, limit)
        assert list(zip(paths(found), found.counts.tolist())) == expected
        of = dict(naive(rows, 10**9)) | {(): m}
        assert found.parent_counts.tolist() == [of[path[:-1]] for path, _ in expected]


def test_many_rows() -> None:
    rows = np.array([[1, 2]] * 40_000 + [[3, END]] * 3, dtype=np.int64)  # more than 16 bits count
    found = best_nodes(rows, END, 10)
    assert (paths(found), found.counts.tolist()) == ([(1,), (1, 2), (3,)], [40_000, 40_000, 3])


@pytest.mark.parametrize(("shape", "limit"), [((0, 3), 5), ((4, 0), 5), ((4, 3), 0)])
def test_nothing(shape: tuple[int, int], limit: int) -> None:
    assert len(best_nodes(np.zeros(shape, dtype=np.int64), END, limit).tree) == 0
