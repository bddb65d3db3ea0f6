"""The suffix array of a corpus, sorted as deep as retrieval looks and no deeper.

Prefix doubling (Manber and Myers, 1993) in whole-array operations: where the first h tokens are ranked, one sort ranks
up to 2 h. Repeated files make full sorting slow, and nothing is ever read beyond the depth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.errors import ConfigError

MAX_TOKENS = 2**32 - 2


def sort_suffixes(
    tokens: NDArray[Any], depth: int, tick: Callable[[float], None] = lambda share: None
) -> NDArray[np.uint32]:
    """Every position, in the order of the `depth` tokens from there on.

    Args:
        tokens: [n].
        depth: tokens that are compared; where the corpus ends sooner, the shorter comes first. Equal ones stay in
            the order of their positions.
        tick: is told the share of the work that is done.

    Returns:
        [n] uint32.

    Raises:
        ConfigError: more tokens than 32 bits can count, or a depth below 1.
    """
    check_sortable(len(tokens), depth)
    if len(tokens) == 0:
        return np.zeros(0, dtype=np.uint32)
    keys, sorted_depth = _first_keys(tokens, depth)
    num_sorts, done = _num_sorts(sorted_depth, depth), 0
    while True:
        order = np.argsort(keys, kind="stable")
        done += 1
        tick(done / num_sorts)
        if sorted_depth == depth:
            break
        ranks, num_ranks = _ranks(keys, order)
        if num_ranks == len(tokens):  # no two are equal any more
            break
        step = min(sorted_depth, depth - sorted_depth)  # at most to the depth itself: the halves may overlap
        keys = ranks.astype(np.uint64) << np.uint64(32)
        keys[:-step] |= ranks[step:]
        sorted_depth += step
    return order.astype(np.uint32)


def check_sortable(num_tokens: int, depth: int) -> None:
    """
    Raises:
        ConfigError: as `sort_suffixes`.
    """
    if num_tokens > MAX_TOKENS or depth < 1:
        raise ConfigError(
            f"{num_tokens:,} tokens to sort by depth {depth}, but an index holds at most {MAX_TOKENS:,} and sorts by "
            "at least 1. Split the corpus into several indices, or raise the depth."
        )


def _first_keys(tokens: NDArray[Any], depth: int) -> tuple[NDArray[np.uint64], int]:
    """As many tokens as 64 bits hold, packed so that numbers sort as they do, and how many that is.

    Tokens are replaced by their rank among those that occur, from 1; 0 stands beyond the corpus's end.
    """
    values, inverse = np.unique(tokens, return_inverse=True)
    bits = len(values).bit_length()
    count = min(64 // bits, depth, len(tokens))
    ranks = inverse.astype(np.uint64) + np.uint64(1)
    keys = np.zeros(len(tokens), dtype=np.uint64)
    for offset in range(count):
        keys <<= np.uint64(bits)
        keys[: len(tokens) - offset] |= ranks[offset:]
    return keys, depth if count == len(tokens) else count


def _ranks(keys: NDArray[np.uint64], order: NDArray[np.intp]) -> tuple[NDArray[np.uint32], int]:
    """Rank of every position's key, from 1, equal for equal keys; and the highest."""
    in_order = keys[order]
    steps = np.ones(len(keys), dtype=np.uint32)
    np.not_equal(in_order[1:], in_order[:-1], out=steps[1:], casting="unsafe")
    np.cumsum(steps, out=steps)
    ranks = np.empty_like(steps)
    ranks[order] = steps
    return ranks, int(steps[-1])


def _num_sorts(first: int, depth: int) -> int:
    count = 1
    while first < depth:
        first, count = first * 2, count + 1
    return count
