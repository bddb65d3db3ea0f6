"""The constraint that holds one sequence to its grammar, along drafted paths too, and its mask on logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence as Seq
from time import thread_time
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from forerun.errors import GrammarDeadEndError
from forerun.types import Allowed, Matcher, Sequence, allow, is_allowed
from forerun.utils.tree import Tree

_SECONDS, _SECONDS_PER_POSITION = 1.0, 0.02
"""Processor time that a grammar may take: most take a hundredth, and one that takes more holds up everybody's steps."""


DeadRows: TypeAlias = dict[int, GrammarDeadEndError]
"""Rows from which no token can be drawn, and why."""


class SequenceConstraint:
    """Runs a matcher along the sequence's tokens, and along paths after them.

    The matcher is moved from one position to the next by undoing tokens and accepting others. Its position follows from
    tokens alone, so that an undone step needs nothing: the matcher is moved, or made again, at the next call.

    Args:
        new_matcher: makes a matcher that has seen nothing.
        end_ids: tokens that end the output. They may follow where the text may end.
        vocab_size: V.
    """

    def __init__(self, new_matcher: Callable[[], Matcher], end_ids: Iterable[int], vocab_size: int) -> None:
        self._new_matcher = new_matcher
        self._end_ids = frozenset(token_id for token_id in end_ids if token_id < vocab_size)
        self._matcher: Matcher | None = None  # None: it has to be made again
        self._committed = 0  # the output's tokens, as many as were there at the last call
        self._given: list[int] = []  # the tokens that the matcher has taken, committed ones and those after them
        self._refused: GrammarDeadEndError | None = None  # of a committed token
        self._memory: dict[tuple[int, ...], Allowed] = {}  # path after the committed tokens -> what may follow
        self._seconds = 0.0
        self._positions = 0

    def allowed(self, sequence: Sequence, paths: Seq[Seq[int]]) -> list[Allowed]:
        self._follow(sequence)
        return [self._after(sequence, tuple(path)) for path in paths]

    def viable(self, sequence: Sequence, tree: Tree) -> list[bool]:
        self._follow(sequence)
        if self._refused is not None:
            return [False] * len(tree)
        found: list[bool] = []
        ended: list[bool] = []
        paths: list[list[int]] = []
        for token_id, parent in zip(tree.ids, tree.parents, strict=True):
            above = paths[parent] if parent >= 0 else []
            ends = token_id in self._end_ids
            possible = parent < 0 or (found[parent] and not ended[parent])
            if possible and ends:
                bits = self._after(sequence, tuple(above))
                possible = isinstance(bits, np.ndarray) and is_allowed(bits, token_id)
            elif possible:
                possible = self._move(sequence, [*above, token_id])
            found.append(possible)
            ended.append(ends)
            paths.append([*above, token_id])
        return found

    def forced(self, sequence: Sequence, limit: int) -> list[int]:
        self._follow(sequence)
        if limit <= 0 or self._refused is not None or not self._move(sequence, []):
            return []
        assert self._matcher is not None
        path = self._matcher.forced()[:limit]
        while len(path) < limit:
            token_id = _only(self._after(sequence, tuple(path)))
            if token_id is None:
                break
            path.append(token_id)
        return path

    def _follow(self, sequence: Sequence) -> None:
        """Add the tokens that were committed since the last call to the committed tokens."""
        length = sequence.num_output
        if length < self._committed:  # another sequence's tokens, or fewer than there were
            self._memory.clear()
            self._matcher = None
            self._refused = None
            self._committed = 0
        if length == self._committed:
            return
        new = sequence.token_ids[sequence.num_prompt + self._committed :]
        self._memory.clear()
        if self._refused is None and self._matcher is not None and not self._move(sequence, new):
            self._refused = _refusal()
        self._committed = length

    def _move(self, sequence: Sequence, path: Seq[int]) -> bool:
        """Move the matcher to the end of this path after the committed tokens. Return False if it refuses one of the
        path's.

        It then stands as far as it came. An interrupt leaves no matcher.
        """
        matcher = self._matcher
        self._matcher = None
        started = thread_time()
        if matcher is None:
            matcher = self._new_matcher()
            first = sequence.num_prompt
            self._given = sequence.token_ids[first : first + self._committed]
            if not all(map(matcher.accept, self._given)):
                self._refused = _refusal()
                return False
        ahead = self._given[self._committed :]
        common = 0
        while common < min(len(ahead), len(path)) and ahead[common] == path[common]:
            common += 1
        if common < len(ahead) and not matcher.undo(len(ahead) - common):
            return self._move(sequence, path)
        count = common
        while count < len(path) and matcher.accept(path[count]):
            count += 1
        self._given[self._committed + common :] = path[common:count]
        self._matcher = matcher
        self._seconds += thread_time() - started
        return count == len(path)

    def _after(self, sequence: Sequence, path: tuple[int, ...]) -> Allowed:
        if self._refused is not None:
            return self._refused
        if path not in self._memory:
            self._memory[path] = self._ask(sequence, path)
        return self._memory[path]

    def _ask(self, sequence: Sequence, path: tuple[int, ...]) -> Allowed:
        if not self._end_ids.isdisjoint(path):
            return None
        if not self._move(sequence, path):
            return _refusal()
        matcher = self._matcher
        self._matcher = None
        assert matcher is not None
        started = thread_time()
        try:
            bits, may_end = matcher.allowed()
        except GrammarDeadEndError as error:
            return error
        self._seconds += thread_time() - started
        self._positions += 1
        self._matcher = matcher
        if self._seconds > _SECONDS + _SECONDS_PER_POSITION * self._positions:
            return GrammarDeadEndError(
                f"The grammar takes too long to follow: {self._seconds:.1f} s of processor time for {self._positions} "
                "positions. Make it less ambiguous, or simpler."
            )
        if may_end:
            allow(bits, sorted(self._end_ids))
        return bits if bits.any() else no_token()


def mask_logits(logits: Tensor, allowed: Seq[Allowed]) -> DeadRows:
    """Change [R, V] logits in place, and return the rows for which there is an error. allowed: [R]."""
    rows = [row for row, bits in enumerate(allowed) if isinstance(bits, np.ndarray)]
    if rows:
        packed = np.stack([bits for bits in allowed if isinstance(bits, np.ndarray)])
        unpacked = np.unpackbits(packed, axis=-1, count=logits.shape[-1], bitorder="little")
        mask = torch.from_numpy(unpacked).to(logits.device) == 0
        if len(rows) == len(allowed):
            logits.masked_fill_(mask, -math.inf)
        else:
            logits[rows] = logits[rows].masked_fill_(mask, -math.inf)
    return {row: error for row, error in enumerate(allowed) if isinstance(error, GrammarDeadEndError)}


def no_token() -> GrammarDeadEndError:
    """Make the error of a position where the grammar allows no token."""
    return GrammarDeadEndError(
        "The grammar allows no token here together with the request's other options, and the text is not complete. "
        "If min_tokens or ignore_eos is set, leave it out; else widen the grammar."
    )


def _only(bits: Allowed) -> int | None:
    """Return the token that alone may follow; None if there are more, or none."""
    if not isinstance(bits, np.ndarray) or np.count_nonzero(bits) != 1:
        return None
    at = int(bits.argmax())
    byte = int(bits[at])
    return 8 * at + byte.bit_length() - 1 if byte.bit_count() == 1 else None


def _refusal() -> GrammarDeadEndError:
    return GrammarDeadEndError(
        "The grammar refuses a token that it had allowed, which is a fault of the library that follows it. Send the "
        "request again with another seed, or write the grammar in another way."
    )
