"""Decides which sequences' tokens a model that drafts computes as they come."""

from __future__ import annotations

from collections.abc import Iterable
from math import exp

from forerun.types import Sequence, Step

MIN_DRAFT_SHARE = 0.25
"""Share of its steps in which a sequence must draft to be prefilled early: probes alone are fewer."""
SEQUENCE_MEMORY = 32
"""Steps of a sequence over which that share is averaged."""
DRAFTER_MEMORY = 64
"""Steps, counted per sequence, over which the share of all sequences is averaged."""


class PrefillPolicy:
    """Decides by how often sequences draft whether their tokens are prefilled as they come.

    Early prefill costs nothing for a sequence that will draft, since its tokens must be computed in any case, and its
    first draft does not wait for a long prompt. For a sequence that never drafts it is wasted: in a batch too large
    for drafts to pay, each prompt would be computed twice. So a sequence is prefilled as long as it drafts. A new one
    is, while others draft, where a prompt costs little (`is_cheap`); else its first draft must repay the prompt.
    """

    __slots__ = ("_drafting", "_is_cheap", "_lengths", "_overall_share", "_shares")

    def __init__(self, *, is_cheap: bool) -> None:
        self._is_cheap = is_cheap
        self._shares: dict[Sequence, float] = {}
        self._lengths: dict[Sequence, int] = {}
        self._drafting: set[Sequence] = set()
        self._overall_share = 0.0

    def start(self, sequence: Sequence) -> None:
        """Register a sequence."""
        self._shares[sequence] = self._overall_share if self._is_cheap else 0.0
        self._lengths[sequence] = len(sequence.token_ids)

    def stop(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._shares.pop(sequence, None)
        self._lengths.pop(sequence, None)
        self._drafting.discard(sequence)

    def record_drafts(self, sequences: Iterable[Sequence]) -> None:
        """Record that these sequences draft in this step."""
        self._drafting.update(sequences)

    def prefills(self, step: Step) -> bool:
        """Record that a step is over, and return whether its sequence is prefilled before it drafts again."""
        sequence = step.sequence
        share = self._shares[sequence]
        if step.verdict is not None:
            if not share and not self._overall_share and sequence not in self._drafting:  # nobody drafts
                self._lengths[sequence] = len(sequence.token_ids)
                return False
            share = self._count(sequence)
        return share >= MIN_DRAFT_SHARE

    def _count(self, sequence: Sequence) -> float:
        """Count a step in which the sequence might have drafted, or several without a draft, one per token, and return
        its share."""
        drafted = float(sequence in self._drafting)
        length = len(sequence.token_ids)
        steps = 1 if drafted else max(length - self._lengths[sequence], 1)
        self._drafting.discard(sequence)
        self._lengths[sequence] = length
        self._overall_share = _decayed(self._overall_share, drafted, steps / DRAFTER_MEMORY)
        share = self._shares[sequence] = _decayed(self._shares[sequence], drafted, steps / SEQUENCE_MEMORY)
        return share


def _decayed(mean: float, value: float, weight: float) -> float:
    """Return an exponentially decaying mean after one more value."""
    return value + (mean - value) * exp(-weight)
