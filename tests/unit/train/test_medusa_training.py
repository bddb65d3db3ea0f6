"""What only the training of Medusa heads has: accuracies, which shape trees."""

from __future__ import annotations

import torch

from forerun.drafters.models.medusa.config import RANKS
from forerun.train.heads.module import head_rows
from forerun.train.medusa import accuracies


def test_accuracies_are_counted_along_chains() -> None:
    """One document of eight tokens, of which the last five are wanted."""
    tokens = torch.arange(8)[None]
    wanted = torch.tensor([[False] * 3 + [True] * 5])
    rows = head_rows(tokens, wanted, torch.zeros(1, 8, dtype=torch.int32), 2)
    ranks = torch.full((2, 8), -1)
    for source in rows.states[rows.active].tolist():
        for k in range(2):
            if wanted[0, min(7, source + 2 + k)] and source + 2 + k < 8:
                ranks[k, source + 1 + k] = 0
    ranks[0, 4] = 1  # the second choice was right there
    ranks[1, 6] = RANKS  # far off
    ranks[0, 6] = -1  # does not count
    found = accuracies([(rows, ranks)], 2)
    assert found[:2] == (0.75, 0.25) and sum(found[RANKS:]) == found[RANKS] == 0.75
    assert accuracies([], 2) == ()
