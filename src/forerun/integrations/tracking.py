"""The sequences of a program that shows rows of tokens without saying whose they are."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from forerun.config import SamplingParams
from forerun.types import Draft, Sequence, Step, TokenIds, Verdict

_TAIL = 8
"""Last tokens by which a row's sequence is looked up, before all of them are compared."""
Tokens = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Tracked:
    """A sequence, and the row's tokens as they were last seen.

    Attributes:
        sequence: its tokens are the beginning of the row, as far as a drafter has been told of them.
        row: at least [length], what the row held.
        length: of the row.
        draft: what was proposed for it last; None where nothing was asked for.
        path: the nodes of the draft that were handed over.
    """

    sequence: Sequence
    row: Tokens
    length: int
    draft: Draft | None = None
    path: list[int] = field(default_factory=list)

    @property
    def num_unread(self) -> int:
        """Tokens of the row that the sequence does not hold yet."""
        return self.length - len(self.sequence.token_ids)

    @property
    def is_read(self) -> bool:
        """Whether the sequence holds all of the row."""
        return self.num_unread == 0

    @property
    def proposed(self) -> list[int]:
        """The tokens that were handed over."""
        return [] if self.draft is None else [self.draft.ids[node] for node in self.path]

    def see(self, row: Tokens, length: int) -> None:
        """The row is so long now; what it held before is its beginning."""
        if length > len(self.row):
            self.row = np.concatenate([self.row[: self.length], np.zeros(length, np.int32)])
        self.row[self.length : length] = row[self.length : length]
        self.length = length

    def read(self, count: int) -> Step:
        """The next tokens of the row join the sequence, as those of a prompt do."""
        self._grow(count)
        return Step(self.sequence, None, None, len(self.sequence.token_ids))

    def judged(self, num_new: int) -> Step | None:
        """What a step has made of the draft; None where there is none, or the row has gone on in another way.

        num_new: tokens that the step has added: a part of the path that was handed over, and one more.
        """
        if self.draft is None or num_new != self.num_unread or not 0 < num_new <= len(self.path) + 1:
            return None
        new = self._unread(num_new)
        if new[:-1] != self.proposed[: num_new - 1]:
            return None
        self._grow(num_new)
        return Step(self.sequence, self.draft, Verdict(self.path[: num_new - 1], new[-1]), self.length - 1)

    def _unread(self, count: int) -> list[int]:
        start = len(self.sequence.token_ids)
        tokens: list[int] = self.row[start : start + count].tolist()
        return tokens

    def _grow(self, count: int) -> None:
        token_ids = self.sequence.token_ids
        assert isinstance(token_ids, TokenIds)
        list.extend(token_ids, self._unread(count))

    def begins(self, row: Tokens, length: int) -> bool:
        """Whether a row of this length goes on from what is here."""
        count = self.length
        return count <= length and bool((self.row[:count] == row[:count]).all())


class Tracker:
    """Sequences by their tokens: rows move when requests end, and carry no names.

    Two rows that hold the same tokens have a sequence each; which is which makes no difference.

    Args:
        max_sequences: kept at most, those that were seen last.
        max_length: tokens of a row at most.
    """

    def __init__(self, max_sequences: int, max_length: int) -> None:
        self._max_sequences, self._max_length = max_sequences, max_length
        self._kept: dict[Tracked, None] = {}
        """The one that was seen last at the end."""
        self._by_tail: dict[tuple[int, bytes], list[Tracked]] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, row: Tokens, length: int, num_new: int) -> Tracked | None:
        """The sequence of a row, which is not kept any more; None where there is none.

        Args:
            row: at least [length].
            num_new: tokens of the row that the last step has added.
        """
        before = length - num_new
        for tracked in self._by_tail.get(_key(row, before), ()):
            if tracked.begins(row, before):
                return self._drop(tracked)
        for tracked in reversed(self._kept):  # steps that nobody was told of, or a request that goes on from another
            if tracked.begins(row, before):
                return self._drop(tracked)
        return None

    def new(self, row: Tokens, length: int) -> Tracked:
        """A sequence for a row that has none, not kept yet; nothing of it is read."""
        self._next_id += 1
        sequence = Sequence(self._next_id, TokenIds(), 0, SamplingParams(), max_length=self._max_length)
        return Tracked(sequence, row[:length].copy(), length)

    def keep(self, tracked: Tracked) -> list[Tracked]:
        """Keep a sequence; those that leave for it."""
        self._kept[tracked] = None
        self._by_tail.setdefault(_key(tracked.row, tracked.length), []).append(tracked)
        return [self._drop(next(iter(self._kept))) for _ in range(len(self._kept) - self._max_sequences)]

    def clear(self) -> list[Tracked]:
        """Keep none; those that were kept."""
        return [self._drop(tracked) for tracked in list(self._kept)]

    def _drop(self, tracked: Tracked) -> Tracked:
        del self._kept[tracked]
        key = _key(tracked.row, tracked.length)
        self._by_tail[key].remove(tracked)
        if not self._by_tail[key]:
            del self._by_tail[key]
        return tracked


def _key(row: Tokens, length: int) -> tuple[int, bytes]:
    return length, row[max(0, length - _TAIL) : length].tobytes()
