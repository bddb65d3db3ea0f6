"""What a draft's nodes have been worth, by their place in it: for all sequences, and for each."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq

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
ACCEPTANCE_OWN_WEIGHT = 8.0
"""Pseudo-trials, accepted and rejected, of the prior that a sequence accepts as often as the others."""
ACCEPTANCE_REFRESH = 16
"""Drafts after which the shared steps are computed again."""
LENGTH_WEIGHT = 2.0
"""Pseudo-trials of the prior that a drafter proposes as many nodes as it is asked for."""

_TRIED, _ACCEPTED, _OPEN, _DRAFTED = range(4)
_REFUSED, _PARTLY, _FULLY = range(3)
"""What became of a sequence's last draft: it says much of the next one where text comes in bursts."""
_FRESH = (1.0, 1.0)


class Acceptance:
    """The chance that node r of a draft is there and accepted, when at least r + 1 nodes were asked for.

    Nodes are ordered by value, so a draft cut shorter is worth the sum of its first chances, chain or tree. A chance
    is a product of steps, each learned only where the one before came true: r accepted where r - 1 was (for a chain,
    the acceptance conditional on reaching the position), and r drafted where r - 1 was (look-ups often find nothing,
    and drafters stop by themselves). A step never seen is believed to be like those before it.

    All sequences together teach these steps, for each fate of the sequence's last draft. A sequence is thought to be
    easier or harder than others by one factor on the odds of all its steps.
    """

    def __init__(self, size: int = MAX_NUM_DRAFT_TOKENS) -> None:
        self.size = size
        self._counts = np.zeros((3, 4, size))
        self._steps: tuple[Array, Array] = (np.zeros(0), np.zeros(0))
        self._steps_known: tuple[list[list[float]], list[list[float]]] = ([], [])
        self._fate: dict[Hashable, int] = {}
        self._num_new = self._num_seen = 0  # drafts since the steps were worked out, and before
        # accepted and what was expected, refused and what was expected; then the same of drafted nodes
        self._own: dict[Hashable, list[float]] = {}
        self._odds: dict[Hashable, tuple[float, float]] = {}
        self._refresh()

    def observe(self, key: Hashable, budget: int, drafted: int, accepted: Seq[int], forget: float = 1.0) -> None:
        """A draft has been verified.

        Args:
            key: of the sequence.
            budget: nodes that were asked for.
            drafted: nodes that came and could be accepted.
            accepted: indices of those that were.
            forget: factor on all that the sequence showed before; 1 unless that is long ago.
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
        counts = self._counts[fate]
        counts[:, :budget] *= ACCEPTANCE_SHARED_DECAY
        if not accepted or accepted[-1] == len(accepted) - 1:  # a chain's nodes, or a tree's first
            counts[_TRIED, : len(tried)] += 1
            counts[_ACCEPTED, : len(accepted)] += 1
        else:
            counts[_TRIED, tried] += 1
            counts[_ACCEPTED, accepted] += 1
        counts[_OPEN, :opened] += 1
        counts[_DRAFTED, :drafted] += 1
        self._num_new += 1
        if drafted:
            self._fate[key] = _REFUSED if not accepted else _FULLY if accepted[-1] == drafted - 1 else _PARTLY

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
        fates = [self._fate.get(key, _PARTLY) for key in keys]
        odds = np.array([self._odds.get(key, _FRESH) for key in keys])
        self._refresh()
        accepts, goes_on = self._steps
        gains = _tilt(accepts[fates, :places], odds[:, :1])
        chances = _tilt(goes_on[fates, :places], odds[:, 1:])
        return np.cumprod(gains, axis=1, dtype=np.float64), np.cumprod(chances, axis=1, dtype=np.float64)

    def _learn_own(
        self, key: Hashable, fate: int, tried: list[int], num_accepted: int, opened: int, drafted: int, decay: float
    ) -> None:
        """How the sequence differs from what was to be expected of any."""
        accepts, goes_on = self._steps_known
        hoped = sum(accepts[fate][place] for place in tried)
        looked = sum(goes_on[fate][:opened])
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
        """Work out the steps that all sequences share, [fates, size] each, once enough is new."""
        if self._steps[0].size and self._num_new < min(ACCEPTANCE_REFRESH, 1 + self._num_seen // 4):
            return
        self._num_seen += self._num_new
        self._num_new = 0
        tried, accepted, opened, drafted = self._counts.sum(0)
        # what came before a place is the guess for it, all places but the first taken together
        seen, good = np.cumsum(tried), np.cumsum(accepted)
        weight = ACCEPTANCE_WEIGHT
        guess = np.full(self.size, ACCEPTANCE_FIRST)
        guess[1:] = ACCEPTANCE_NEXT
        guess[2:] = (good[1:-1] - good[0] + weight * ACCEPTANCE_NEXT) / (seen[1:-1] - seen[0] + weight)
        every = (accepted + weight * guess) / (tried + weight)
        goes_on = (drafted + LENGTH_WEIGHT) / (opened + LENGTH_WEIGHT)
        weight = ACCEPTANCE_STATE_WEIGHT
        accepts = (self._counts[:, _ACCEPTED] + weight * every) / (self._counts[:, _TRIED] + weight)
        drafts = (self._counts[:, _DRAFTED] + weight * goes_on) / (self._counts[:, _OPEN] + weight)
        self._steps = accepts, drafts
        self._steps_known = accepts.tolist(), drafts.tolist()


def _ratio(came: float, expected: float, failed: float, feared: float) -> float:
    """Odds beside those expected, with a belief that there is no difference."""
    weight = ACCEPTANCE_OWN_WEIGHT
    return (came + weight) / (expected + weight) * (feared + weight) / (failed + weight)


def _tilt(chances: Array, odds: Array) -> Array:
    """[B, L] the chances with their odds multiplied. odds: [B, 1]."""
    chances = np.minimum(chances, 0.999)
    tilted: Array = odds * chances / (1 - chances + odds * chances)
    return tilted
