"""Expected tokens per second by number of draft tokens, from acceptance probabilities and the costs of a step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from forerun.config import MAX_NUM_DRAFT_TOKENS

Array = NDArray[np.float64]
Counts = NDArray[np.int64]

LIMITS = np.array([0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, MAX_NUM_DRAFT_TOKENS])
"""Limits of K that are compared for several sequences."""
THRESHOLDS = np.array([0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9])
"""Thresholds of acceptance that are compared for several sequences."""
GAIN_ALONE = (0.02, 0.0)
"""Relative gain over plain decoding that drafting must promise, to begin and to go on, for a single sequence."""
GAIN_TOGETHER = (0.05, 0.02)
"""The same of several, where of many plans that cost about the same the best has often been measured luckily."""


@dataclass(frozen=True, slots=True)
class Prospects:
    """What the next step of some sequences is expected to give and to cost.

    Attributes:
        gains: [B, L] expected accepted nodes at each position of each draft.
        accept_probs: [B, L] probability that a draft of more than r requested nodes has one at position r.
        target: [R] seconds of a step by rows, drafting apart.
        draft: [L + 1] seconds of drafting for all of them by the largest K; the first entry is the drafter's
            cost in a step in which it does not draft.
        growth: power of the number of sequences with which drafting, beyond that, grows.
    """

    gains: Array
    accept_probs: Array
    target: Array
    draft: Array
    growth: float = 0.0

    def rates_together(self) -> tuple[Array, Counts]:
        """Compute the rates of several sequences, for a grid of limits and thresholds at which each draft ends.

        The threshold is on a node's probability of acceptance, given that it is there.

        Returns:
            [T, M] tokens per second by threshold and limit, [T, M, B] the numbers of draft tokens.
        """
        batch, places = self.gains.shape
        given = np.minimum.accumulate(self.gains / np.maximum(self.accept_probs, 1e-9), 1)
        ends = (given[None] >= THRESHOLDS[:, None, None]).sum(2)
        limits = LIMITS[: int(np.searchsorted(LIMITS, places, "right"))]
        num_draft_tokens = np.minimum(ends[:, None, :], limits[None, :, None])
        flat = num_draft_tokens + np.arange(batch) * (places + 1)
        tokens = _from_zero(self.gains).take(flat).sum(2) + batch
        rows = _from_zero(self.accept_probs).take(flat).sum(2) + batch
        seconds = np.interp(rows, np.arange(len(self.target)), self.target)
        seconds += self._drafting(num_draft_tokens.max(2), (num_draft_tokens > 0).sum(2))
        return tokens / seconds, num_draft_tokens

    def outlook(self, num_draft_tokens: Seq[int]) -> tuple[float, float]:
        """Return expected tokens and seconds of a step. num_draft_tokens: [B]."""
        batch, places = self.gains.shape
        flat = np.minimum(num_draft_tokens, places) + np.arange(batch) * (places + 1)
        rows = float(_from_zero(self.accept_probs).take(flat).sum()) + batch
        longest = np.array(min(max(num_draft_tokens), places))
        drafting = float(self._drafting(longest, np.array(sum(k > 0 for k in num_draft_tokens))))
        seconds = float(np.interp(rows, np.arange(len(self.target)), self.target)) + drafting
        return float(_from_zero(self.gains).take(flat).sum()) + batch, seconds

    def _drafting(self, longest: Counts, asked: Counts) -> Array:
        """Return the seconds of drafting, elementwise. asked: sequences that draft."""
        idle = self.draft[0]
        share = (np.maximum(asked, 1) / len(self.gains)) ** self.growth
        seconds: Array = np.where(asked > 0, idle + (self.draft[longest] - idle) * share, idle)
        return seconds


class ProspectsAlone:
    """The same of a single sequence, as lists: arrays of a few numbers are slower.

    Args:
        gains, accept_probs: [L], as in Prospects.
        target: [L + 2] seconds of a step by rows.
        draft: [L + 1] as in Prospects.

    Attributes:
        tokens, seconds, rates: [L + 1] expected tokens and seconds of a step, and tokens per second, by K.
    """

    __slots__ = ("rates", "seconds", "tokens")

    def __init__(self, gains: Seq[float], accept_probs: Seq[float], target: Seq[float], draft: Seq[float]) -> None:
        self.tokens = list(accumulate(gains, initial=1.0))
        rows = [target[1]]  # seconds of the target by K: a draft may be shorter
        for place, accept_prob in enumerate(accept_probs):
            rows.append(rows[-1] + accept_prob * (target[place + 2] - target[place + 1]))
        self.seconds = [row + node for row, node in zip(rows, draft, strict=True)]
        self.rates = [token / second for token, second in zip(self.tokens, self.seconds, strict=True)]

    def outlook(self, num_draft_tokens: Seq[int]) -> tuple[float, float]:
        """Return expected tokens and seconds of a step. num_draft_tokens: [1]."""
        k = min(num_draft_tokens[0], len(self.tokens) - 1)
        return self.tokens[k], self.seconds[k]


def pays(rate: float, plain: float, gain: tuple[float, float], *, goes_on: bool) -> bool:
    """Return whether drafting at this rate gives so much more than plain decoding that it begins, or continues."""
    return rate > plain * (1 + gain[goes_on])


def min_acceptance_prob(
    rate: float, num_draft_tokens: Seq[int], target: Seq[float] | Array, draft: Seq[float] | Array
) -> float:
    """Return the acceptance probability above which a node raises tokens per second, which are `rate` now.

    Slopes are taken over a few rows, since kernels pad and costs rise in steps.

    Args:
        rate: tokens per second with these numbers of draft tokens.
        num_draft_tokens: [B].
        target: [R] seconds of a step by rows, drafting apart.
        draft: [L + 1] seconds of drafting by the largest K.
    """
    batch, longest = len(num_draft_tokens), max(num_draft_tokens)
    if longest == 0:
        return 0.0
    last = len(target) - 1  # beyond it further rows are taken to cost what the last ones do
    rows = min(batch + sum(num_draft_tokens), last)
    low, high = min(max(batch, rows - 4), last), min(rows + 4, last)
    row = (target[high] - target[low]) / max(high - low, 1)
    first = int(longest > 1)
    node = (draft[longest] - draft[first]) / (longest - first) / batch
    return min(max(rate * float(row + node), 0.0), 0.9)


def _from_zero(values: Array) -> Array:
    """Return [B, L + 1] running sums, the first 0."""
    sums = np.zeros((len(values), values.shape[1] + 1))
    np.cumsum(values, 1, out=sums[:, 1:])
    return sums
