"""How often each head's first, second, ... token is the one that comes: what shapes a static tree."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from forerun.heads.medusa_config import RANKS
from forerun.train.heads.rows import HeadRows


def accuracies(found: Iterable[tuple[HeadRows, Tensor]], num_heads: int) -> tuple[float, ...]:
    """As `MedusaConfig.accuracies`; none where nothing was found.

    Args:
        found: rows and [K, N] ranks of the token that comes among what each head guesses, at the place from whose state
            the target predicts it; below 0 where it does not count.
    """
    tried, right = torch.zeros(num_heads), torch.zeros(num_heads, RANKS)
    for rows, ranks in found:
        starts = rows.states[rows.active].to(ranks.device)
        alive = torch.ones(len(starts), dtype=torch.bool, device=ranks.device)
        for k in range(num_heads):
            places = starts + 1 + k
            rank = ranks[k, places.clamp(max=ranks.shape[1] - 1)]
            alive = alive & (places < ranks.shape[1]) & (rank >= 0)
            tried[k] += int(alive.sum())
            alive = alive & (rank < RANKS)
            right[k] += torch.bincount(rank[alive].cpu(), minlength=RANKS)
    if not bool(tried[0]):
        return ()
    return tuple(round(float(value), 4) for value in (right / tried.clamp(min=1)[:, None]).flatten())
