"""Whether one drafter is better than another on the same text, beyond chance."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

BLOCK = 16
"""Positions in a row whose mean is one observation: chains that begin side by side share tokens."""
LEAST_BLOCKS = 8
"""Observations without which nothing is decided."""
ENTERS = 3.0
"""A copy enters if its gain exceeds so many of its standard errors: with eight blocks that happens by chance once in a
hundred times (one-sided t), with many once in 700."""
LEAVES = 2.0
"""What drafts leaves if its loss exceeds so many: what it gives way to has been shown to be no worse before."""


@dataclass(frozen=True, slots=True)
class Gain:
    """What one drafter accepts more than another, in tokens a draft.

    Attributes:
        mean: over blocks. error: its standard error.
        blocks: how many there were.
    """

    mean: float
    error: float
    blocks: int

    def exceeds(self, errors: float) -> bool:
        """Return whether there is a gain of more than so many standard errors."""
        return self.blocks >= LEAST_BLOCKS and self.mean > errors * self.error


def gain(ours: Tensor, theirs: Tensor) -> Gain:
    """Compare two drafters position by position, paired.

    ours, theirs: [n] accepted tokens of the draft that begins at each of the same positions, in order.
    """
    blocks = len(ours) // BLOCK
    if blocks < 2:
        return Gain(0.0, 0.0, blocks)
    difference = (ours - theirs)[: blocks * BLOCK].double().view(blocks, BLOCK).mean(1)
    return Gain(float(difference.mean()), float(torch.std(difference)) / sqrt(blocks), blocks)
