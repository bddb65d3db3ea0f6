"""The base of drafters that copy: acceptance of copied tokens by how many tokens before them matched."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq

from forerun.drafters.base import Drafter
from forerun.speculation import Rates
from forerun.speculation.acceptance import odds_ratio, with_odds
from forerun.types import Draft, Sequence, Step

COPY_RATES = (0.1, 0.3, 0.65, 0.85, 0.9, 0.97, 0.98)
"""Prior probability that a copied token is accepted, by the binary digits of how many tokens before it matched."""


def level_of(length: int) -> int:
    """Return the level of a copied token by how many tokens before it matched."""
    return min(length.bit_length(), len(COPY_RATES) - 1)


_OWN_WEIGHT = 3.0
"""Pseudo-trials, accepted and rejected, of the prior that a sequence's copies are accepted as often as others'."""
_OWN_DECAY = 0.95
"""Weight that a sequence's earlier trials keep at each new one."""


class CopyDrafter(Drafter):
    """The base of drafters that copy, never beyond the sequence's maximum length.

    Copies are cut where their probability no longer exceeds the minimum; it is learned from the tokens that were
    committed. A copied token's level is the number of binary digits of its match length: the tokens before it, copied
    ones included, that precede the copied position too. Trials are counted for what was cut off as well, as far as
    committed tokens reach, so that a level whose copies are always cut is still measured. A sequence differs from the
    others by one factor on the odds of all levels.

    Args:
        prior: of each level's probability.
        source: the copies' name, where there are statistics of it.
    """

    def __init__(self, prior: Seq[float] = COPY_RATES, source: str | None = None) -> None:
        self._rates = Rates(prior)
        self._source = source
        self._copied: dict[Sequence, tuple[int, list[int], list[int]]] = {}
        self._own: dict[Sequence, tuple[float, float, float]] = {}  # trials, accepted, and expected to be

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        drafts = []
        for sequence, max_nodes in zip(sequences, num_draft_tokens, strict=True):
            count = min(max_nodes, sequence.room)
            token_ids, levels = self._copy(sequence, count) if count > 0 else ([], [])
            accept_probs: list[float] = []
            if token_ids:
                self._copied[sequence] = (len(sequence.token_ids), token_ids, levels)
                accept_probs = self._accept_probs(sequence, levels, min_acceptance_prob)
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
            start, token_ids, levels = copied
            for token_id, level, committed in zip(token_ids, levels, sequence.token_ids[start:], strict=False):
                tried, came, expected = (_OWN_DECAY * each for each in self._own.get(sequence, (0.0, 0.0, 0.0)))
                rate = self._rates.rate(level)
                self._own[sequence] = tried + 1, came + (token_id == committed), expected + rate
                self._rates.observe(level, token_id == committed)
                if token_id != committed:
                    break

    def stop(self, sequence: Sequence) -> None:
        self._copied.pop(sequence, None)
        self._own.pop(sequence, None)

    def _accept_probs(self, sequence: Sequence, levels: list[int], least: float) -> list[float]:
        """Return the probabilities that the tokens of a copy are accepted, as far as they exceed `least`."""
        tried, came, expected = self._own.get(sequence, (0.0, 0.0, 0.0))
        odds = odds_ratio(came, expected, tried - came, tried - expected, _OWN_WEIGHT)
        probs = []
        accept_prob = 1.0
        for level in levels:
            accept_prob *= with_odds(self._rates.rate(level), odds)
            if accept_prob <= least:
                break
            probs.append(accept_prob)
        return probs

    def _read(self, sequence: Sequence, end: int) -> None:
        """Take in the sequence's tokens up to there."""

    @abstractmethod
    def _copy(self, sequence: Sequence, count: int) -> tuple[list[int], list[int]]:
        """Return at most `count` tokens, which is 1 or more, and the level of each."""
