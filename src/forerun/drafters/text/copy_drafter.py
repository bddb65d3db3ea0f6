"""What drafters that copy share: how often a copied token was right, by how many tokens before it matched."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq

from forerun.drafters.base import OneByOne
from forerun.policy import Rates
from forerun.types import Draft, Sequence, Step

COPY_RATES = (0.1, 0.3, 0.65, 0.85, 0.9, 0.97, 0.98)
"""Prior chance that a copied token is accepted, by the binary digits of how many tokens before it matched."""


class CopyRates:
    """Cuts copies where their chance no longer exceeds the price, and learns from the tokens that were committed.

    A copied token's level is the number of binary digits of its match length: the tokens before it, copied ones
    included, that stand before the place it was copied from too. Trials are counted for what was cut off as well, as
    far as committed tokens reach, so that a level whose copies are always cut is still measured.

    Args:
        prior: of each level's chance.
    """

    __slots__ = ("_copied", "_rates")

    def __init__(self, prior: Seq[float] = COPY_RATES) -> None:
        self._rates = Rates(prior)
        self._copied: dict[Sequence, tuple[int, list[int], list[int]]] = {}

    def rate(self, length: int) -> float:
        """The chance that a token copied after a match of this length is accepted."""
        return self._rates.rate(length.bit_length())

    def draft(
        self, sequence: Sequence, token_ids: list[int], lengths: list[int], price: float, source: str | None = None
    ) -> Draft:
        """The chain of those tokens whose chance to be reached and accepted exceeds the price; all at price 0.

        Args:
            token_ids: the copy, not yet cut.
            lengths: the match length of each.
            source: its name, where there are statistics of it.
        """
        self._copied[sequence] = (len(sequence.token_ids), token_ids, lengths)
        if price > 0:
            token_ids = token_ids[: self._count_above(lengths, price)]
        draft = Draft.chain(token_ids)
        if source is not None:
            draft.sources = (source,) * len(draft)
        return draft

    def observe(self, sequence: Sequence) -> None:
        """The sequence holds what was committed: compare it with the last copy."""
        copied = self._copied.pop(sequence, None)
        if copied is None:
            return
        start, token_ids, lengths = copied
        for token_id, length, committed in zip(token_ids, lengths, sequence.token_ids[start:], strict=False):
            self._rates.observe(length.bit_length(), token_id == committed)
            if token_id != committed:
                break

    def stop(self, sequence: Sequence) -> None:
        """The sequence leaves."""
        self._copied.pop(sequence, None)

    def _count_above(self, lengths: list[int], price: float) -> int:
        """How many tokens of a copy are reached and accepted with a chance above the price."""
        chance = 1.0
        for count, length in enumerate(lengths):
            chance *= self.rate(length)
            if chance <= price:
                return count
        return len(lengths)


class CopyDrafter(OneByOne):
    """The base of drafters that copy, never beyond the sequence's room.

    Args:
        prior: as of CopyRates.
    """

    def __init__(self, prior: Seq[float] = COPY_RATES) -> None:
        self._rates = CopyRates(prior)

    def commit(self, steps: Seq[Step]) -> None:
        for step in steps:
            if step.verdict is None:  # spread the cost of a long prompt over its chunks
                self._read(step.sequence, step.num_computed)
            self._rates.observe(step.sequence)

    def stop(self, sequence: Sequence) -> None:
        self._rates.stop(sequence)

    def _read(self, sequence: Sequence, end: int) -> None:
        """Take in the sequence's tokens up to there."""

    def _draft(self, sequence: Sequence, budget: int, price: float) -> Draft:
        return self._copy(sequence, min(budget, sequence.room), price)

    @abstractmethod
    def _copy(self, sequence: Sequence, budget: int, price: float) -> Draft:
        """A draft of at most `budget` tokens, at least 1."""
