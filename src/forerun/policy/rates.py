"""Acceptance rates by level, with a prior and a decay."""

from __future__ import annotations

from collections.abc import Sequence

RATE_DECAY = 0.98
"""Weight that earlier trials keep when one more of the same level is observed: about the last fifty count."""
RATE_PRIOR_WEIGHT = 2.0
"""Pseudo-trials of the prior."""


class Rates:
    """Acceptance by level: of each position, match length, or bin of a drafter's confidence.

    The estimate is that of a beta prior around `prior`, after trials whose weight decays with every new trial of the
    same level. Only uncensored trials count: a node is one if its parent was accepted (or is the last committed
    token); the others were never compared with the target.

    Args:
        prior: the rate of each level before any trial.
        weight: pseudo-trials of the prior.
        decay: factor on the earlier trials' weight at each new one.
    """

    __slots__ = ("_accepted", "_decay", "_prior", "_tried", "_weight")

    def __init__(self, prior: Sequence[float], weight: float = RATE_PRIOR_WEIGHT, decay: float = RATE_DECAY) -> None:
        self._prior = list(prior)
        self._weight = weight
        self._decay = decay
        self._tried = [0.0] * len(prior)
        self._accepted = [0.0] * len(prior)

    def __len__(self) -> int:
        return len(self._prior)

    def rate(self, level: int) -> float:
        """The chance that something of this level is accepted; levels beyond the last count as the last."""
        level = min(level, len(self._prior) - 1)
        weight = self._weight
        return (self._accepted[level] + weight * self._prior[level]) / (self._tried[level] + weight)

    def observe(self, level: int, accepted: bool) -> None:
        """One uncensored trial."""
        level = min(level, len(self._prior) - 1)
        self._tried[level] = self._tried[level] * self._decay + 1
        self._accepted[level] = self._accepted[level] * self._decay + accepted

    def trials(self, level: int) -> float:
        """Decayed number of trials of a level."""
        return self._tried[min(level, len(self._prior) - 1)]


def bin_of(confidence: float, num_bins: int) -> int:
    """The level of a confidence in [0, 1] among equally wide bins; what is out of it, or NaN, counts as 0 or as 1."""
    if not confidence > 0:
        return 0
    return int(min(confidence * num_bins, num_bins - 1))


def bin_centres(num_bins: int) -> list[float]:
    """The prior that takes a drafter's confidence at its word."""
    return [(i + 0.5) / num_bins for i in range(num_bins)]
