"""The suffix array against sorting by definition."""

import random

import numpy as np
import pytest

from forerun.drafters.lookup.rest import index_file as module
from forerun.drafters.lookup.rest.index_file import sort_suffixes
from forerun.errors import ConfigError


def naive(tokens: list[int], depth: int) -> list[int]:
    return sorted(range(len(tokens)), key=lambda at: (tokens[at : at + depth], at))


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<u4", "uint64"])
@pytest.mark.parametrize("depth", [1, 2, 3, 7, 16, 32])
def test_against_the_definition(dtype: str, depth: int) -> None:
    rng = random.Random(f"{dtype}{depth}")
    for size in (1, 2, 3, 9, 40, 200):
        for values in (1, 2, 5, 60_000):
            tokens = [rng.randrange(values) for _ in range(size)]
            assert sort_suffixes(np.array(tokens, dtype=dtype), depth).tolist() == naive(tokens, depth)


def test_repeated_passages_and_wide_tokens() -> None:
    rng = random.Random(1)
    passage = [rng.randrange(2**32 - 1) for _ in range(50)]
    tokens = [*passage, 2**32 - 1, *passage, 2**32 - 1, *passage[:20], 2**32 - 1]
    result = sort_suffixes(np.array(tokens, dtype=np.uint32), 32)
    assert result.dtype == np.uint32
    assert result.tolist() == naive(tokens, 32)


@pytest.mark.parametrize("depth", [3, 8, 9, 13, 20, 32])
def test_differences_deeper_than_one_key_holds(depth: int) -> None:
    rng = random.Random(depth)
    words = [[10_000 + word, *range(20_000, 20_006)] for word in range(4)]
    for _ in range(5):
        tokens = [*range(500), *(token for _ in range(60) for token in rng.choice(words))]
        assert sort_suffixes(np.array(tokens, dtype=np.uint32), depth).tolist() == naive(tokens, depth)


def test_no_tokens() -> None:
    assert len(sort_suffixes(np.zeros(0, dtype=np.uint16), 8)) == 0


def test_progress_ends_at_the_whole() -> None:
    shares: list[float] = []
    sort_suffixes(np.zeros(100, dtype=np.uint16), 90, shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_what_cannot_be_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="by depth 0"):
        sort_suffixes(np.zeros(3, dtype=np.uint16), 0)
    monkeypatch.setattr(module, "MAX_TOKENS", 2)
    with pytest.raises(ConfigError, match="3 tokens"):
        sort_suffixes(np.zeros(3, dtype=np.uint16), 4)
