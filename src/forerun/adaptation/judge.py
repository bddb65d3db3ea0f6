"""Whether one drafter is better than another on the same text, beyond chance, however often that is asked."""

from __future__ import annotations

from dataclasses import dataclass
from math import erfc, inf, log1p, sqrt

from torch import Tensor

BLOCK = 16
"""Positions in a row whose mean is one observation: chains that begin side by side share tokens."""
LEAST_BLOCKS = 8
"""Observations without which nothing is decided."""
CHANCE = 0.05
"""Probability that a drafter which is no better is ever taken for better, in all looks at it together."""


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

    @property
    def chance(self) -> float:
        """Return the probability of such a gain, or a larger one, by chance (Student's t, one-sided)."""
        if self.blocks < LEAST_BLOCKS or self.mean <= 0:
            return 1.0
        t = self.mean / self.error if self.error else inf
        free = self.blocks - 1
        # Wallace (1959): the normal deviate of the same tail, to three digits far beyond those that looks ask for
        normal = (8 * free + 1) / (8 * free + 3) * sqrt(free * log1p(t * t / free))
        return erfc(normal / sqrt(2)) / 2

    def is_beyond_chance(self, look: int) -> bool:
        """Return whether there is a gain beyond chance, at the nth look, from 1 on, for one. The looks share CHANCE as
        1/2, 1/6, 1/12...: their sum is 1 whatever their number, and they need not be independent."""
        return self.chance < CHANCE / (look * (look + 1))


def gain(ours: Tensor, theirs: Tensor) -> Gain:
    """Compare two drafters position by position, paired.

    ours, theirs: [n] accepted tokens of the draft that begins at each of the same positions, in order.
    """
    blocks = len(ours) // BLOCK
    if blocks < 2:
        return Gain(0.0, 0.0, blocks)
    difference = (ours - theirs)[: blocks * BLOCK].double().view(blocks, BLOCK).mean(1)
    rest = difference - difference.mean()
    # Blocks of one text are alike: what neighbours have in common widens the error, and never narrows it.
    shared = max(0.0, float((rest[1:] * rest[:-1]).sum()))
    error = sqrt((float(rest.square().sum()) + 2 * shared) / (blocks - 1) / blocks)
    return Gain(float(difference.mean()), error, blocks)
