"""From the probability that a draft model gives a token to the chance that the target accepts it."""

from __future__ import annotations

from math import sqrt

from forerun.policy import Rates, bin_centres, bin_of

_BINS = 12
"""Bins of a draft model's probabilities; they are equally wide in the probability's square root."""
_RANKS = 3
"""Ranks of a token among its siblings that are told apart; later ones count as the last."""
_DECAY = 0.995
"""Weight that earlier trials of a level keep at each new one."""


class Confidence:
    """Turns the probability that a draft model gives a token into the chance that it is accepted.

    Probabilities fall into bins that are narrower towards 0, apart for each rank among the token's siblings. Of each
    bin it is measured how often its tokens were accepted; inside a bin the chance grows with the probability, so that
    the order of tokens stays. The prior is the probability itself.

    Attributes:
        rates: where the trials are counted, by level.
    """

    __slots__ = ("_typical", "rates")

    def __init__(self) -> None:
        self._typical = [centre**2 for centre in bin_centres(_BINS)]
        self.rates = Rates(self._typical * _RANKS, decay=_DECAY)

    def level(self, probability: float, rank: int = 0) -> int:
        """Where a token is counted. rank: 0 for the most probable of its siblings."""
        place = bin_of(sqrt(min(max(probability, 0.0), 1.0)), _BINS)
        return min(rank, _RANKS - 1) * _BINS + place

    def factors(self) -> list[float]:
        """By level, as `_factor` is now."""
        return [self._factor(level) for level in range(len(self.rates))]

    def chance(self, probability: float, level: int) -> float:
        """The chance that a token of this probability and level is accepted if its parent is; at most 1."""
        return min(probability * self._factor(level), 1.0)

    def _factor(self, level: int) -> float:
        """What the probability of a token of this level is multiplied by for its chance, as far as that is below 1."""
        return self.rates.rate(level) / self._typical[level % _BINS]
