"""What lookahead decoding keeps of one sequence: the window of guesses at what is to come, and the pool of n-grams."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache
from random import Random

Ngram = tuple[int, ...]


class NgramPool:
    """The n-grams that began with each token, the most recently seen ones.

    Args:
        per_token: G, n-grams kept of a token.
        max_ngrams: n-grams kept in all; beyond, the token whose n-grams were renewed least recently loses them.
    """

    __slots__ = ("_max", "_per_token", "_pool", "_size")

    def __init__(self, per_token: int, max_ngrams: int) -> None:
        self._per_token, self._max = per_token, max_ngrams
        self._pool: dict[int, dict[Ngram, None]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, token_id: int, rest: Ngram) -> None:
        """See an n-gram: token_id and what followed it."""
        ngrams = self._pool.pop(token_id, None) or {}
        self._pool[token_id] = ngrams  # dicts keep the order of insertion: the last is the most recent
        self._size -= len(ngrams)
        ngrams.pop(rest, None)
        ngrams[rest] = None
        if len(ngrams) > self._per_token:
            del ngrams[next(iter(ngrams))]
        self._size += len(ngrams)
        while self._size > self._max and len(self._pool) > 1:
            self._size -= len(self._pool.pop(next(iter(self._pool))))

    def find(self, token_id: int) -> list[Ngram]:
        """What followed a token, most recent first."""
        return list(self._pool.get(token_id, ()))[::-1]


@lru_cache(maxsize=1024)
def window_parents(columns: int, num_rows: int) -> tuple[list[int], list[int]]:
    """The window as nodes of a tree, row by row; column 0 of row 0 is the root, -1.

    Row 0 is a chain; column j of every other row follows column j of the row above. So row r, column j sees row 0 up
    to j and column j of rows 1..r, and stands r + j after the last committed token.

    Returns:
        parents of the columns * num_rows - 1 nodes, and the nodes of the last row.
    """
    parents = list(range(-1, columns - 2))
    above = list(range(-1, columns - 1))
    for _ in range(1, num_rows):
        first = len(parents)
        parents += above
        above = list(range(first, first + columns))
    return parents, above


class Window:
    """W columns of num_rows = N - 1 tokens: the last iterates of a Jacobi iteration, the oldest in row 0.

    Each column begins as a piece of the prompt, and gives an n-gram once all below its row 0 was computed.

    Args:
        filler: tokens to begin with, not empty; they also stand in for ends of text.
        seed: of the choice among them.
    """

    __slots__ = ("_ages", "_columns", "_filler", "_num_rows", "_random")

    def __init__(self, width: int, num_rows: int, filler: Seq[int], seed: int) -> None:
        self._num_rows, self._filler, self._random = num_rows, filler, Random(seed)
        self._columns = [self._piece() for _ in range(width)]
        self._ages = [0] * width

    def token_ids(self, columns: int) -> list[int]:
        """Tokens of the first columns, row by row, without column 0 of row 0, which is the last committed token."""
        return [column[row] for row in range(self._num_rows) for column in self._columns[:columns]][1:]

    def advance(self, last_token: int, computed: Seq[int], end_of_text: frozenset[int]) -> list[tuple[int, Ngram]]:
        """Take over the target's tokens after the last row of the first columns, and drop their row 0.

        Args:
            last_token: what stood in row 0, column 0.
            computed: tokens for the first len(computed) columns; the others stay as they are.
            end_of_text: tokens after which nothing can be guessed.

        Returns:
            the n-grams found, each as its first token and the rest.
        """
        found = []
        for j, new in enumerate(computed):
            column = self._columns[j]
            head = column[0] if j else last_token
            if self._ages[j] >= self._num_rows - 1:
                found.append((head, (*column[1:], new)))
            if new in end_of_text:
                self._ages[j], new = -1, self._random.choice(self._filler)
            self._ages[j] += 1
            self._columns[j] = [*column[1:], new]
        return found

    def _piece(self) -> list[int]:
        start = self._random.randrange(len(self._filler))
        return [self._filler[(start + i) % len(self._filler)] for i in range(self._num_rows)]
