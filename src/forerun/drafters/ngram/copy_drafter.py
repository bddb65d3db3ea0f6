"""The base of drafters that copy: acceptance of copied tokens by how many tokens before them matched."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq

from forerun.drafters.base import Drafter
from forerun.speculation import Rates
from forerun.types import Draft, Sequence, Step

COPY_RATES = (0.1, 0.3, 0.65, 0.85, 0.9, 0.97, 0.98)
"""Prior probability that a copied token is accepted, by the binary digits of how many tokens before it matched."""


class CopyDrafter(Drafter):
    """The base of drafters that copy, never beyond the sequence's maximum length.

    Copies are cut where their probability no longer exceeds the minimum; it is learned from the tokens that were
    committed. A copied token's level is the number of binary digits of its match length: the tokens before it, copied
    ones included, that precede the copied position too. Trials are counted for what was cut off as well, as far as
    committed tokens reach, so that a level whose copies are always cut is still measured.

    Args:
        prior: of each level's probability.
        source: the copies' name, where there are statistics of it.
    """

    def __init__(self, prior: Seq[float] = COPY_RATES, source: str | None = None) -> None:
        self._rates, self._source = Rates(prior), source
        self._copied: dict[Sequence, tuple[int, list[int], list[int]]] = {}

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        drafts = []
        for sequence, max_nodes in zip(sequences, num_draft_tokens, strict=True):
            count = min(max_nodes, sequence.room)
            token_ids, lengths = self._copy(sequence, count) if count > 0 else ([], [])
            accept_probs: list[float] = []
            if token_ids:
                self._copied[sequence] = (len(sequence.token_ids), token_ids, lengths)
                accept_probs = self._accept_probs(lengths, min_acceptance_prob)
            draft = Draft.chain(token_ids[: len(accept_probs)])
            draft.accept_probs = accept_probs
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

    def _accept_probs(self, lengths: list[int], least: float) -> list[float]:
        """Return the probabilities that the tokens of a copy are accepted, as far as they exceed `least`."""
        probs, accept_prob = [], 1.0
        for length in lengths:
            accept_prob *= self._rates.rate(length.bit_length())
            if accept_prob <= least:
                break
            probs.append(accept_prob)
        return probs

    def _read(self, sequence: Sequence, end: int) -> None:
        """Take in the sequence's tokens up to there."""

    @abstractmethod
    def _copy(self, sequence: Sequence, count: int) -> tuple[list[int], list[int]]:
        """Return at most `count` tokens, which is 1 or more, and the match length of each."""
