"""What followed a context in many answers, and how often: their tokens sorted once, and counted when they are read."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from forerun.drafters.lookup.rest.index import Match, SortedTokens
from forerun.drafters.lookup.rest.index_file import SUFFIX_BYTES, sort_suffixes

MOST_MATCH = 32
"""Tokens before a position that are compared at most."""
_DEPTH = 64
"""Tokens by which the answers are sorted: a match and what is copied after it, as long as there are several places."""
_MOST_COUNTED = 32
"""Places at which the next token is counted; of more, so many at even distances."""
_MOST_FORKS = 4
"""Places of a copy at which the answers may differ; beyond, it ends."""
_LEAST_SHARE = 0.1
"""Share of the places from which a copy begins that its tokens still stand for, by their counts; beyond, it ends."""


@dataclass(frozen=True, slots=True)
class CountedCopy:
    """A copy, and how sure it is.

    Attributes:
        token_ids: its tokens.
        lengths: how many tokens before each match.
        counts: of each token, after how many places it came.
        totals: how many places there were.
    """

    token_ids: list[int]
    lengths: list[int]
    counts: list[int]
    totals: list[int]

    def add(self, token_ids: Sequence[int], length: int, count: int, total: int) -> None:
        """Lengthen it by tokens that all came after the same number of places.

        length: tokens that match before the first of them.
        """
        self.token_ids.extend(token_ids)
        self.lengths.extend(range(length, length + len(token_ids)))
        self.counts.extend([count] * len(token_ids))
        self.totals.extend([total] * len(token_ids))


class SortedAnswers(SortedTokens):
    """The answers of one tenant, sorted: about a second for a million tokens, mostly without Python's lock.

    Args:
        answers: tokens of each, the high byte first; the oldest answer first.
        width: bytes of a token.
        tick: is called now and then while they are sorted, and may raise.
    """

    def __init__(
        self, answers: Sequence[bytes], width: int, tick: Callable[[float], None] = lambda share: None
    ) -> None:
        self._marker = b"\xff" * width
        data = b"".join(part for answer in answers for part in (answer, self._marker))
        tokens = np.frombuffer(data, f">u{width}").astype(f"=u{width}")
        super().__init__(data, 0, width, sort_suffixes(tokens, _DEPTH, tick).data)

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all answers, and an end of each."""
        return len(self.suffixes)

    @staticmethod
    def bytes_of_token(width: int) -> int:
        """Return the bytes of memory for each token, with its place in the order."""
        return width + SUFFIX_BYTES

    def find(self, context: Sequence[int], least: int, expected: int) -> Match | None:
        """Find the longest end of a context that occurs, of `least` to `MOST_MATCH` tokens.

        expected: its length, if it is as long as it can be.
        """
        encoded = np.asarray(context[-min(expected, MOST_MATCH) :], dtype=f">u{self._width}").tobytes()
        most = len(encoded) // self._width
        if most < least:
            return None
        row, present = self._first(encoded)
        return self._match(most, row, encoded) if present else self._longest(encoded, least, most - 1)

    def copy(self, match: Match, count: int) -> CountedCopy:
        """Copy what follows a match, at each place by the token that came most often, of equally frequent ones by the
        last to come; count: tokens at most."""
        copied = CountedCopy([], [], [], [])
        first = match.first
        last = match.last
        length = match.length
        share = 1.0
        for num_forks in range(_MOST_FORKS + 1):
            left = count - len(copied.token_ids)
            if left <= 0:
                break
            alone = last - first == 1 or length >= _DEPTH  # those that are equal so far stand in the order of time
            common = self._common(first, last, length, left if alone else min(left, _DEPTH - length), alone)
            copied.add(common, length, last - first, last - first)
            if alone or len(common) == left or num_forks == _MOST_FORKS:
                break
            length += len(common)
            if length < _DEPTH:
                fork = self._most_frequent(first, last, length)
                if fork is None:
                    break
                token, times, total = fork
                share *= times / total
                if share < _LEAST_SHARE:
                    break
                first, last = self._narrowed(first, last, length, token)
                copied.add([int.from_bytes(token)], length, times, total)
                length += 1
        return copied

    def _common(self, first: int, last: int, length: int, most: int, alone: bool) -> list[int]:
        """Return the tokens on which all rows agree after the first `length`; alone: those of the last row."""
        read = self._reader(most * self._width, length)
        mine = read(self.suffixes[last - 1])
        size = len(mine)
        if not alone:
            other = read(self.suffixes[first])
            size = min(size, len(other))
            if mine[:size] != other[:size]:
                size = next(at for at in range(size) if mine[at] != other[at])
        tokens: list[int] = np.frombuffer(mine, f">u{self._width}", size // self._width).tolist()
        end = int.from_bytes(self._marker)
        return tokens[: tokens.index(end)] if end in tokens else tokens

    def _most_frequent(self, first: int, last: int, length: int) -> tuple[bytes, int, int] | None:
        """Return the token that most often comes after the first `length` of these rows, how often, and at how many
        places it was counted; None where all answers end."""
        total = min(last - first, _MOST_COUNTED)
        read = self._reader(self._width, length)
        counted: dict[bytes, tuple[int, int]] = {}
        for index in range(total):
            position = self.suffixes[first + index * (last - first) // total]
            token = read(position)
            times, latest = counted.get(token, (0, 0))
            counted[token] = times + 1, max(latest, position)
        counted.pop(self._marker, None)
        if not counted:
            return None
        token, (times, _) = max(counted.items(), key=lambda item: item[1])
        return token, times, total

    def _narrowed(self, first: int, last: int, length: int, token: bytes) -> tuple[int, int]:
        """Return which of these rows go on with a token after the first `length`."""
        read = self._reader(self._width, length)
        begin = bisect_left(self.suffixes, token, first, last, key=read)
        return begin, bisect_right(self.suffixes, token, begin, last, key=read)
