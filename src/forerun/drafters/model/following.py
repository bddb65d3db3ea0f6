"""Whether a draft model computes with a sequence's tokens before it is asked to draft for it."""

from __future__ import annotations

from collections.abc import Iterable
from math import exp

from forerun.types import Sequence, Step

FOLLOW_SHARE = 0.25
"""Share of its steps in which a sequence must draft to be followed: probes alone are fewer."""
SEQUENCE_MEMORY = 32
"""Steps of a sequence over which that share is taken."""
DRAFTER_MEMORY = 64
"""Steps of any sequences, counted apiece, over which it is taken of all together."""


class Following:
    """Counts how often sequences draft.

    To follow one that will draft costs nothing, for its tokens must be computed with in any case, and its first draft
    is not held up by a long prompt. To follow one that never drafts is lost: in a batch too large for drafts to pay,
    each prompt would be computed twice. So a sequence is followed as long as it drafts, and a new one while it is usual
    to draft.
    """

    __slots__ = ("_asked", "_lengths", "_shares", "_usual")

    def __init__(self) -> None:
        self._shares: dict[Sequence, float] = {}
        self._lengths: dict[Sequence, int] = {}
        self._asked: set[Sequence] = set()
        self._usual = 1.0

    def start(self, sequence: Sequence) -> None:
        """A sequence enters."""
        self._shares[sequence], self._lengths[sequence] = self._usual, len(sequence.token_ids)

    def stop(self, sequence: Sequence) -> None:
        """A sequence leaves."""
        self._shares.pop(sequence, None)
        self._lengths.pop(sequence, None)
        self._asked.discard(sequence)

    def asked(self, sequences: Iterable[Sequence]) -> None:
        """They draft in this step."""
        self._asked.update(sequences)

    def follows(self, step: Step) -> bool:
        """Whether the tokens of a sequence are computed with as they come, now that a step of it is over."""
        if step.verdict is not None:
            self._count(step.sequence)
        return self._shares[step.sequence] >= FOLLOW_SHARE

    def _count(self, sequence: Sequence) -> None:
        """A step in which it might have drafted; or several in which it has not, of a token each."""
        drafted, length = float(sequence in self._asked), len(sequence.token_ids)
        steps = 1 if drafted else max(length - self._lengths[sequence], 1)
        self._asked.discard(sequence)
        self._lengths[sequence] = length
        self._shares[sequence] = _moved(self._shares[sequence], drafted, steps / SEQUENCE_MEMORY)
        self._usual = _moved(self._usual, drafted, steps / DRAFTER_MEMORY)


def _moved(mean: float, value: float, weight: float) -> float:
    """A mean that forgets, after a value that was seen."""
    return value + (mean - value) * exp(-weight)
