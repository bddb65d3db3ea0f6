"""Probes: when to try other numbers of draft tokens than the best, and what that may cost."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forerun.speculation.goodput import Prospects
from forerun.types import Sequence

PROBE_SHARE = 0.01
"""Share of the time that probes may cost."""
PROBE_LEAST_SHARE = 0.0025
"""The same after many probes that lost time."""
PROBE_FADE = 0.8
"""Factor on that share after each of them."""
PROBE_STEPS = 8
"""Fewest steps between two probes; in inverse proportion more where the share is smaller."""
PROBE_PATIENCE = 64
"""Most steps until a probe that cannot be paid for is considered again."""

PROBE_TOLERANCE = 1.25
"""Factor on the smallest loss for each trial, up to which a probe of fewer sequences is preferred."""


class Probes:
    """An account of time: every step pays a small share of itself in, a probe is bought with what it will lose.

    So probing never costs more than that share of the time, however slow the probed K is, and values of K that
    lose next to nothing are probed often.

    Attributes:
        wait: steps until a probe may be bought, at most 0 if it may now.
    """

    __slots__ = ("_balance", "_income", "_share", "wait")

    def __init__(self) -> None:
        self._balance = self._income = 0.0  # seconds, and seconds that the last steps paid in each
        self._share = PROBE_SHARE
        self.wait = float(PROBE_STEPS)

    def earn(self, seconds: float, steps: int = 1) -> None:
        """Earn from `steps` steps that took `seconds` together."""
        self._income = self._share * seconds / steps
        self._balance += self._share * seconds
        self.wait -= steps

    @property
    def due(self) -> bool:
        """Return whether a probe may be bought now."""
        return self.wait <= 0

    def buy(self, loss: float) -> bool:
        """Buy a probe that loses `loss` seconds, if it can be paid for. Return whether it can."""
        if self._balance < loss:  # not asked again before it can be paid for
            steps = (loss - self._balance) / self._income if self._income else 0.0
            self.wait = min(max(steps, PROBE_STEPS / 2), PROBE_PATIENCE)
            return False
        self._balance -= max(loss, 0.0)
        self.wait = PROBE_STEPS * PROBE_SHARE / self._share
        return True

    def judge(self, gained: bool) -> None:
        """Adjust the share of later probes by whether one gained or lost time."""
        self._share = PROBE_SHARE if gained else max(self._share * PROBE_FADE, PROBE_LEAST_SHARE)


def cheapest_trial(prospects: Prospects, order: Seq[int], rate: float) -> list[int]:
    """Return [B] numbers of draft tokens, with which some of the sequences that do not draft are tried with one node
    each.

    They are so many that a trial loses little, since a drafter's forward costs about the same for one as for all; and
    no more than that, so that the probe can be paid for soon.

    Args:
        order: [B] indices of sequences, those to be tried first at the beginning.
        rate: tokens per second of the steps that are forgone.
    """
    probes, losses = [], []
    count = 1
    while count <= len(order):
        asked = set(order[:count])
        probes.append([int(i in asked) for i in range(len(order))])
        tokens, seconds = prospects.outlook(probes[-1])
        losses.append((seconds - tokens / rate) / count)
        count *= 2
    most = max(PROBE_TOLERANCE * min(losses), 0.0)
    return next(probe for probe, loss in zip(probes, losses, strict=True) if loss <= most)


class Pauses:
    """The first draft after a pause, or of a sequence, may cost more than the next ones.

    A drafter that computes with the tokens before has to catch up with them.
    """

    __slots__ = ("_came", "_lengths", "_steps")

    def __init__(self) -> None:
        self._steps: dict[Sequence, int] = {}  # the last step in which it drafted, or the one before it came
        self._lengths: dict[Sequence, int] = {}  # its tokens when it drafted last
        self._came = 0

    def __len__(self) -> int:
        """Return the number of sequences that are followed."""
        return len(self._steps)

    def come(self, sequence: Sequence, step: int) -> None:
        """Note that a sequence takes part from the next step on, unless it does already."""
        if sequence not in self._steps:
            self._steps[sequence] = step
            self._came += len(sequence.token_ids)

    def tokens_that_came(self) -> int:
        """Return the tokens of the sequences that have come since the last call."""
        count, self._came = self._came, 0
        return count

    def drafted(self, sequence: Sequence, step: int) -> None:
        """Note that a sequence has drafted in this step."""
        self._steps[sequence] = step
        self._lengths[sequence] = len(sequence.token_ids)

    def stop(self, sequence: Sequence) -> None:
        """Forget a sequence that leaves."""
        self._steps.pop(sequence, None)
        self._lengths.pop(sequence, None)

    def last(self, sequence: Sequence) -> int:
        """Return the last step in which it drafted, or the one before it came."""
        return self._steps[sequence]

    def has_paused(self, sequence: Sequence, step: int) -> bool:
        """Return whether it has been there without a draft until this step."""
        return step > self._steps.get(sequence, step) + 1

    def lag(self, sequence: Sequence, step: int) -> int:
        """Return the tokens that have come since it drafted, with a pause until this step; all if it never has."""
        if sequence not in self._lengths:
            return len(sequence.token_ids)
        return max(len(sequence.token_ids) - self._lengths[sequence], 1) if self.has_paused(sequence, step) else 0
