"""Several different tokens drawn from each of a batch of distributions, one after the other."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor


def draw_distinct(probs: Tensor, counts: Seq[int], generator: torch.Generator) -> list[list[int]]:
    """Draws without replacement: each from what the distribution holds beside the tokens before it.

    That is what draws with replacement give once repeats are left out, and those cost one cumulative sum for them all.

    Args:
        probs: [R, V], not negative, not necessarily summing to one.
        counts: [R] how many tokens of each; at least 1.

    Returns:
        The tokens of each row in the order of draws; fewer where no others have any weight.
    """
    drawn: list[list[int]] = [[] for _ in counts]
    rows, weights = list(range(len(counts))), probs
    while rows:
        cumulative = weights.cumsum(-1, dtype=torch.float64)  # in float32 the least probable tokens would be lost
        totals = cumulative[:, -1:]
        uniforms = torch.rand(len(rows), 2 * max(counts), dtype=torch.float64, generator=generator)
        picked = torch.searchsorted(cumulative, uniforms * totals, right=True).tolist()
        short = []
        for i, (row, tokens, total) in enumerate(zip(rows, picked, totals[:, 0].tolist(), strict=True)):
            if total > 0:
                found = drawn[row]
                found += dict.fromkeys(tokens)  # none of an earlier turn: those weigh nothing any more
                del found[counts[row] :]
                if len(found) < counts[row]:
                    short.append(i)
        rows = [rows[i] for i in short]
        if rows:
            weights = weights[short].index_put(
                (
                    torch.tensor([i for i, row in enumerate(rows) for _ in drawn[row]]),
                    torch.tensor([token for row in rows for token in drawn[row]]),
                ),
                weights.new_zeros(()),
            )
    return drawn
