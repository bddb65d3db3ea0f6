"""How often a draft's nodes are accepted, by their place in it: for all sequences, and for each."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from forerun.config import MAX_NUM_DRAFT_TOKENS

Array = NDArray[np.float64]

ACCEPTANCE_FIRST = 0.6
"""Prior acceptance of a draft's first node."""
ACCEPTANCE_NEXT = 0.8
"""Prior acceptance of a later node, given that the node before it was accepted."""
ACCEPTANCE_DECAY = 0.98
"""Weight that a sequence's earlier trials keep when it drafts again."""
ACCEPTANCE_SHARED_DECAY = 0.995
"""Weight that all sequences' earlier trials of a place keep when it is tried again."""
ACCEPTANCE_WEIGHT = 4.0
"""Pseudo-trials of a place's prior, which is the acceptance of the places before it."""
ACCEPTANCE_STATE_WEIGHT = 8.0
"""Pseudo-trials of the prior that the last draft's outcome does not change acceptance."""
ACCEPTANCE_SEQUENCE_WEIGHT = 8.0
"""Pseudo-trials, accepted and rejected, of the prior that a sequence accepts as often as the others."""
ACCEPTANCE_MOST = 0.999
"""Largest chance of a step."""
ACCEPTANCE_REFRESH = 16
"""Drafts after which the shared steps are computed again."""
LENGTH_WEIGHT = 2.0
"""Pseudo-trials of the prior that a drafter proposes as many nodes as it is asked for."""

_ASKED, _TRIED, _ACCEPTED, _OPEN, _DRAFTED = range(5)
_REJECTED, _PARTLY, _FULLY = range(3)
"""What became of a sequence's last draft. Acceptance of the next one depends on it where text comes in bursts."""
_EVEN = (1.0, 1.0)


class Acceptance:
    """The chance that node r of a draft is there and accepted, when at least r + 1 nodes were asked for.

    Nodes are ordered by their chance, so the expected acceptance of a draft cut shorter is the sum of its first
    chances, chain or tree. A chance is a product of steps, each learned only where the step before came true: r
    accepted where r - 1 was (for a chain, the acceptance conditional on reaching the position), and r drafted where
    r - 1 was (look-ups often find nothing, and drafters stop by themselves). The prior of a step is the mean of those
    before it.

    All sequences together teach these steps, for each outcome of the sequence's last draft. A sequence differs from
    the others by one factor on the odds of all its steps.
    """

    def __init__(self, size: int = MAX_NUM_DRAFT_TOKENS) -> None:
        self.size = size
        self._counts = np.zeros((5, 3, size))  # by kind of count, outcome of the last draft, and place
        self._new: tuple[list[int], ...] = ([], [], [], [], [])  # what is not yet in them, as `_fold` reads it
        self._num_new = self._num_seen = 0  # drafts since the steps were computed, and before
        self._steps: tuple[Array, Array] = (np.zeros(0), np.zeros(0))
        self._accepts: list[list[float]] = []  # the same, and running sums of the second
        self._drafts: list[list[float]] = []
        self._drafts_sums: list[list[float]] = []
        self._fate: dict[Hashable, int] = {}
        # accepted and what was expected, rejected and what was expected; then the same of drafted nodes
        self._own: dict[Hashable, list[float]] = {}
        self._odds: dict[Hashable, tuple[float, float]] = {}
        self._compute_steps()

    def observe(self, key: Hashable, budget: int, drafted: int, accepted: Seq[int], forget: float = 1.0) -> None:
        """A draft has been verified.

        Args:
            key: of the sequence.
            budget: nodes that were asked for.
            drafted: nodes that came and could be accepted.
            accepted: indices of those that were.
            forget: factor on the weight of the sequence's earlier drafts; 1 unless they are long ago.
        """
        budget = min(budget, self.size)
        if budget == 0:
            return
        accepted = [node for node in accepted if node < budget]
        drafted = min(drafted, budget)
        tried = [0, *(node + 1 for node in accepted if node + 1 < budget)]
        opened = min(drafted + 1, budget)
        fate = self._fate.get(key, _PARTLY)
        self._learn_own(key, fate, tried, len(accepted), opened, drafted, ACCEPTANCE_DECAY * forget)
        new, first = self._new, fate * self.size
        new[_TRIED].extend([first + place for place in tried])
        new[_ACCEPTED].extend([first + place for place in accepted])
        first += fate
        new[_ASKED].append(first + budget)
        new[_OPEN].append(first + opened)
        new[_DRAFTED].append(first + drafted)
        self._num_new += 1
        if drafted:
            self._fate[key] = _REJECTED if not accepted else _FULLY if accepted[-1] == drafted - 1 else _PARTLY
        if len(new[_ASKED]) >= ACCEPTANCE_REFRESH:
            self._fold()

    def stop(self, key: Hashable) -> None:
        """The sequence leaves."""
        self._own.pop(key, None)
        self._odds.pop(key, None)
        self._fate.pop(key, None)

    def expect(self, keys: Seq[Hashable], places: int) -> tuple[Array, Array]:
        """For each sequence and place: the chance of an accepted node, and that of a node at all.

        Returns:
            Two arrays [len(keys), places].
        """
        self._refresh()
        fates = [self._fate.get(key, _PARTLY) for key in keys]
        odds = np.array([self._odds.get(key, _EVEN) for key in keys])
        accepts, drafts = self._steps
        gains = _tilt(accepts[fates, :places], odds[:, :1])
        chances = _tilt(drafts[fates, :places], odds[:, 1:])
        return gains.cumprod(1), chances.cumprod(1)

    def expect_one(self, key: Hashable, places: int) -> tuple[list[float], list[float]]:
        """The same of one sequence, as lists: arrays of a few numbers are slower."""
        self._refresh()
        fate = self._fate.get(key, _PARTLY)
        odds, odds_drafted = self._odds.get(key, _EVEN)
        gain = chance = 1.0
        gains, chances = [], []
        for accept, draft in zip(self._accepts[fate][:places], self._drafts[fate], strict=False):
            gain *= odds * accept / (1 - accept + odds * accept)
            chance *= odds_drafted * draft / (1 - draft + odds_drafted * draft)
            gains.append(gain)
            chances.append(chance)
        return gains, chances

    def _learn_own(
        self, key: Hashable, fate: int, tried: list[int], num_accepted: int, opened: int, drafted: int, decay: float
    ) -> None:
        """How the sequence differs from what was to be expected of any."""
        accepts = self._accepts[fate]
        hoped = sum([accepts[place] for place in tried])
        looked = self._drafts_sums[fate][opened]
        judged = len(tried)
        now = (
            *(num_accepted, hoped, judged - num_accepted, judged - hoped),
            *(drafted, looked, opened - drafted, opened - looked),
        )
        own = self._own.get(key)
        own = list(now) if own is None else [decay * old + new for old, new in zip(own, now, strict=True)]
        self._own[key] = own
        self._odds[key] = _ratio(*own[:4]), _ratio(*own[4:])

    def _refresh(self) -> None:
        """Compute the steps again once enough drafts are new."""
        if self._num_new >= min(ACCEPTANCE_REFRESH, 1 + self._num_seen // 4):
            self._fold()
            self._num_seen += self._num_new
            self._num_new = 0
            self._compute_steps()

    def _fold(self) -> None:
        """Add the new drafts to the counts, where earlier trials of every place that was asked for lose weight."""
        size = self.size
        new = np.empty_like(self._counts)
        for row in (_TRIED, _ACCEPTED):  # one entry a node
            new[row] = np.bincount(self._new[row], minlength=3 * size).reshape(3, size)
        for row in (_ASKED, _OPEN, _DRAFTED):  # one entry a draft: its length
            lengths = np.bincount(self._new[row], minlength=3 * (size + 1)).reshape(3, size + 1)
            new[row] = lengths[:, ::-1].cumsum(1)[:, -2::-1]
        self._counts *= ACCEPTANCE_SHARED_DECAY ** new[_ASKED]
        self._counts += new
        for each in self._new:
            each.clear()

    def _compute_steps(self) -> None:
        """Compute the steps that all sequences share, [outcomes, size] each."""
        _, tried, accepted, opened, drafted = self._counts.sum(1)
        # the prior of a place is the acceptance of the places before it, all but the first taken together
        seen, good = tried.cumsum(), accepted.cumsum()
        weight = ACCEPTANCE_WEIGHT
        guess = np.full(self.size, ACCEPTANCE_FIRST)
        guess[1:] = ACCEPTANCE_NEXT
        guess[2:] = (good[1:-1] - good[0] + weight * ACCEPTANCE_NEXT) / (seen[1:-1] - seen[0] + weight)
        every = (accepted + weight * guess) / (tried + weight)
        goes_on = (drafted + LENGTH_WEIGHT) / (opened + LENGTH_WEIGHT)
        weight = ACCEPTANCE_STATE_WEIGHT
        accepts = (self._counts[_ACCEPTED] + weight * every) / (self._counts[_TRIED] + weight)
        drafts = (self._counts[_DRAFTED] + weight * goes_on) / (self._counts[_OPEN] + weight)
        self._steps = accepts, drafts = np.minimum(accepts, ACCEPTANCE_MOST), np.minimum(drafts, ACCEPTANCE_MOST)
        self._accepts, self._drafts = accepts.tolist(), drafts.tolist()
        self._drafts_sums = [list(accumulate(each, initial=0.0)) for each in self._drafts]


def _ratio(came: float, expected: float, failed: float, feared: float) -> float:
    """Odds over those expected, with a prior of no difference."""
    weight = ACCEPTANCE_SEQUENCE_WEIGHT
    return (came + weight) / (expected + weight) * (feared + weight) / (failed + weight)


def _tilt(chances: Array, odds: Array) -> Array:
    """[B, L] the chances with their odds multiplied. odds: [B, 1]."""
    tilted: Array = odds * chances / (1 - chances + odds * chances)
    return tilted
