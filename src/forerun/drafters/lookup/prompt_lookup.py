"""Prompt lookup: copy what followed the last few tokens when they last occurred in this sequence.

Saxena, "Prompt Lookup Decoding", 2023. The longest match is used, of equally long ones the most recent.
"""

from __future__ import annotations

from forerun.drafters.base import Traits
from forerun.drafters.lookup.copy_drafter import CopyDrafter, level_of
from forerun.errors import ConfigError
from forerun.types import Sequence


class NgramIndex:
    """Maps each n-gram of a growing list of tokens to its last position; each token is indexed once."""

    __slots__ = ("_ends", "_max", "_min", "_num_indexed")

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._min = min_ngram
        self._max = max_ngram
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def update(self, token_ids: list[int]) -> None:
        """Index the n-grams that end before the last token. An n-gram at the very end would only find itself."""
        ends = self._ends
        sizes = range(self._min, self._max + 1)
        for end in range(self._num_indexed + 1, len(token_ids)):
            for size in sizes:
                if size > end:
                    break
                ends[tuple(token_ids[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(token_ids) - 1)

    def find(self, token_ids: list[int]) -> tuple[int, int] | None:
        """Find the longest earlier match of the list's end, of equally long ones the most recent.

        Returns:
            The index of the token after the match, and how many tokens match; None without a match.
        """
        for size in range(min(self._max, len(token_ids)), self._min - 1, -1):
            end = self._ends.get(tuple(token_ids[-size:]))
            if end is not None:
                return end, size
        return None


class PromptLookup(CopyDrafter):
    """Drafts a chosen chain by copying from the sequence itself, without a model.

    Args:
        min_ngram: tokens that must match (1 or more).
        max_ngram: tokens that may match at most (1 or more).

    Raises:
        ConfigError: not 1 <= min_ngram <= max_ngram.
    """

    def __init__(
        self,
        min_ngram: int = 2,
        max_ngram: int = 4,
    ) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ConfigError(
                f"min_ngram is {min_ngram} and max_ngram {max_ngram}, but 1 <= min_ngram <= max_ngram is needed."
            )
        super().__init__()
        self._min = min_ngram
        self._max = max_ngram
        self._indices: dict[Sequence, NgramIndex] = {}

    @property
    def traits(self) -> Traits:
        return Traits(("PromptLookup", f"n-grams {self._min} to {self._max}"), estimates=True, can_sleep=True)

    def start(self, sequence: Sequence) -> None:
        self._indices[sequence] = NgramIndex(self._min, self._max)

    def stop(self, sequence: Sequence) -> None:
        super().stop(sequence)
        self._indices.pop(sequence, None)

    def _read(self, sequence: Sequence, end: int) -> None:
        self._indices[sequence].update(sequence.token_ids[:end])

    def _copy(self, sequence: Sequence, count: int) -> tuple[list[int], list[int]]:
        """Copy the `count` tokens that follow the longest match, with the level of each; none without a match.

        If fewer than `count` tokens follow the match, they repeat.
        """
        index = self._indices[sequence]
        tokens = sequence.token_ids
        index.update(tokens)
        found = index.find(tokens)
        if found is None:
            return [], []
        start, size = found
        copied = tokens[start : start + count]
        while len(copied) < count:  # the tokens after the match are used up: repeat them
            copied.append(copied[len(copied) - (len(tokens) - start)])
        return copied, [*map(level_of, range(size, size + count))]  # each copied token lengthens the match of the next
