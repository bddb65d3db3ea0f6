"""What drafters that copy share: how often a copied token was right, by how many tokens before it matched."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq

from forerun.drafters.base import Drafter
from forerun.speculation import Rates
from forerun.types import Draft, Sequence, Step

COPY_RATES = (0.1, 0.3, 0.65, 0.85, 0.9, 0.97, 0.98)
"""Prior chance that a copied token is accepted, by the binary digits of how many tokens before it matched."""


class CopyDrafter(Drafter):
    """The base of drafters that copy, never beyond the sequence's room.

    Copies are cut where their chance no longer exceeds the price, which is learned from the tokens that were committed.
    A copied token's level is the number of binary digits of its match length: the tokens before it, copied ones
    included, that stand before the place it was copied from too. Trials are counted for what was cut off as well, as
    far as committed tokens reach, so that a level whose copies are always cut is still measured.

    Args:
        prior: of each level's chance.
        source: the copies' name, where there are statistics of it.
    """

    def __init__(self, prior: Seq[float] = COPY_RATES, source: str | None = None) -> None:
        self._rates, self._source = Rates(prior), source
        self._copied: dict[Sequence, tuple[int, list[int], list[int]]] = {}

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        drafts = []
        for sequence, budget in zip(sequences, num_draft_tokens, strict=True):
            count = min(budget, sequence.room)
            token_ids, lengths = self._copy(sequence, count) if count > 0 else ([], [])
            if token_ids:
                self._copied[sequence] = (len(sequence.token_ids), token_ids, lengths)
                if min_acceptance_prob > 0:
                    token_ids = token_ids[: self._count_above(lengths, min_acceptance_prob)]
            draft = Draft.chain(token_ids)
            if self._source is not None:
                draft.sources = (self._source,) * len(draft)
            drafts.append(draft)
        return drafts

    def commit(self, steps: Seq[Step]) -> None:
        for step in steps:
            sequence = step.sequence
            if step.verdict is None:  # spread the cost of a long prompt over its chunks
                self._read(sequence, step.num_computed)
            copied = self._copied.pop(sequence, None)
            if copied is None:
                continue
            start, token_ids, lengths = copied
            for token_id, length, committed in zip(token_ids, lengths, sequence.token_ids[start:], strict=False):
                self._rates.observe(length.bit_length(), token_id == committed)
                if token_id != committed:
                    break

    def stop(self, sequence: Sequence) -> None:
        self._copied.pop(sequence, None)

    def _count_above(self, lengths: list[int], min_acceptance_prob: float) -> int:
        """How many tokens of a copy are reached and accepted with a chance above the price."""
        accept_prob = 1.0
        for count, length in enumerate(lengths):
            accept_prob *= self._rates.rate(length.bit_length())
            if accept_prob <= min_acceptance_prob:
                return count
        return len(lengths)

    def _read(self, sequence: Sequence, end: int) -> None:
        """Take in the sequence's tokens up to there."""

    @abstractmethod
    def _copy(self, sequence: Sequence, count: int) -> tuple[list[int], list[int]]:
        """At most so many tokens, at least 1 being wanted, and the match length of each."""
