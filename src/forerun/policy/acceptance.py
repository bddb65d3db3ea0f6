"""What a draft's nodes have been worth, by their place in it: for all sequences, and for each."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from forerun.config import (
    ACCEPTANCE_DECAY,
    ACCEPTANCE_FIRST,
    ACCEPTANCE_NEXT,
    ACCEPTANCE_OWN_WEIGHT,
    ACCEPTANCE_SHARED_DECAY,
    ACCEPTANCE_STATE_WEIGHT,
    ACCEPTANCE_WEIGHT,
    LENGTH_WEIGHT,
    MAX_NUM_DRAFT_TOKENS,
)

Array = NDArray[np.float64]
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
        self._steps: tuple[Array, Array] | None = None
        self._fate: dict[Hashable, int] = {}
        self._own: dict[Hashable, Array] = {}  # by _TRIED...: accepted, expected, refused, expected; drafted alike
        self._odds: dict[Hashable, tuple[float, float]] = {}

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
        trial = np.zeros((4, budget))
        trial[_ACCEPTED, accepted] = 1
        trial[_DRAFTED, :drafted] = 1
        trial[_TRIED, 0] = trial[_OPEN, 0] = 1
        trial[_TRIED, 1:] = trial[_ACCEPTED, :-1]
        trial[_OPEN, 1:] = trial[_DRAFTED, :-1]
        fate = self._fate.get(key, _PARTLY)
        self._learn_own(key, fate, trial, ACCEPTANCE_DECAY * forget)
        part = self._counts[fate, :, :budget]
        part *= ACCEPTANCE_SHARED_DECAY
        part += trial
        self._steps = None
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
        accepts, goes_on = self._shared_steps()
        gains = _tilt(accepts[fates, :places], odds[:, :1])
        chances = _tilt(goes_on[fates, :places], odds[:, 1:])
        return _products(gains), _products(chances)

    def _learn_own(self, key: Hashable, fate: int, trial: Array, decay: float) -> None:
        """How the sequence differs from what was to be expected of any."""
        steps = self._shared_steps()
        own = self._own.get(key)
        if own is None:
            own = self._own[key] = np.zeros((2, 4))
        own *= decay
        budget = trial.shape[1]
        for row, step, (tried, came) in zip(own, steps, ((_TRIED, _ACCEPTED), (_OPEN, _DRAFTED)), strict=True):
            expected = float(trial[tried] @ step[fate, :budget])
            num_tried, num_came = float(trial[tried].sum()), float(trial[came].sum())
            row += (num_came, expected, num_tried - num_came, num_tried - expected)
        weight = ACCEPTANCE_OWN_WEIGHT
        ratios = (own + weight).tolist()
        self._odds[key] = (_ratio(ratios[0]), _ratio(ratios[1]))

    def _shared_steps(self) -> tuple[Array, Array]:
        """[fates, size] each: chance of r accepted after r - 1, and of r drafted after r - 1."""
        if self._steps is None:
            tried, accepted, opened, drafted = self._counts.sum(0)
            # what came before a place is the guess for it, all places but the first taken together
            seen, good = np.cumsum(tried), np.cumsum(accepted)
            weight = ACCEPTANCE_WEIGHT
            guess = np.full(self.size, ACCEPTANCE_FIRST)
            guess[1] = ACCEPTANCE_NEXT
            guess[2:] = (good[1:-1] - good[0] + weight * ACCEPTANCE_NEXT) / (seen[1:-1] - seen[0] + weight)
            every = (accepted + weight * guess) / (tried + weight)
            goes_on = (drafted + LENGTH_WEIGHT) / (opened + LENGTH_WEIGHT)
            weight = ACCEPTANCE_STATE_WEIGHT
            self._steps = (
                (self._counts[:, _ACCEPTED] + weight * every) / (self._counts[:, _TRIED] + weight),
                (self._counts[:, _DRAFTED] + weight * goes_on) / (self._counts[:, _OPEN] + weight),
            )
        return self._steps


def _products(steps: Array) -> Array:
    products: Array = np.cumprod(steps, axis=1, dtype=np.float64)
    return products


def _ratio(own: Seq[float]) -> float:
    """Odds beside those expected: came / expected to come, over refused / expected to be refused."""
    return own[0] / own[1] * own[3] / own[2]


def _tilt(chances: Array, odds: Array) -> Array:
    """[B, L] the chances with their odds multiplied. odds: [B, 1]."""
    chances = np.minimum(chances, 0.999)
    tilted: Array = odds * chances / (1 - chances + odds * chances)
    return tilted
