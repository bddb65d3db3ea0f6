"""Draft sessions: chains that grow row by row, on a device that runs asynchronously, and by the native kernels.

Reading a token waits for the device, which then waits for the host. So of the rows whose tokens will be the most
probable ones, several are handed over before anything is read, each with the token ids that the row before has left on
the device; then all are read at once.

On the CPU, a small model's row takes the kernels less time than the preparation of a forward from any rows, trees among
them, takes Python. So there the arrays of a forward are filled in place, and its results are written where the last
ones were: a few calls per row, with no tensor operation between them.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.kernels.cpu.library import Library, RowsStruct
from forerun.kv_cache import PagedCache, SequenceCache
from forerun.models.attention.base import cache_of
from forerun.models.base import LanguageModel, Rows
from forerun.models.rope import CosSinTables
from forerun.types import Cache


@dataclass(frozen=True, slots=True)
class Pick:
    """What to compute from each row's logits.

    Attributes:
        num_columns: from the first, those among which the largest is looked for.
        with_probability: whether its probability is computed.
        num_ahead: rows of each chain that will be fed if every one but the first is fed the token picked before it.
    """

    num_columns: int
    with_probability: bool
    num_ahead: int = 1


@dataclass(frozen=True, slots=True)
class NextTokens:
    """The most probable next token of each chain.

    Attributes:
        logits: [chains, V], as `Forward.logits`; valid until the chains advance again.
        columns: [chains] the first column of the largest logit; -1 if one of the compared logits is not finite.
        probabilities: [chains] of these columns by softmax, 0 where there is none; None if they were not requested.
    """

    logits: Tensor
    columns: list[int]
    probabilities: list[float] | None


class DraftSession(ABC):
    """Rows of some sequences, one after the other, where everything that does not change between them is prepared once.

    Their bits are those of `LanguageModel.forward`.
    """

    @abstractmethod
    def advance(self, tokens: Sequence[Sequence[int]], states: Tensor | None = None) -> NextTokens:
        """Feed tokens, which join the caches' scratch.

        Args:
            tokens: of each chain the next ones, at least one.
            states: [rows, S] what a head reads beside the tokens, chain by chain; None: what the last row of each
                chain has given, or nothing for a model that is no head. The first rows of heads need them.

        Raises:
            IndexError: there is no such token.
            OutOfPagesError: a cache's pool is full.
        """

    @abstractmethod
    def keep(self, indices: Sequence[int]) -> None:
        """Keep only these chains, in this order. indices: of the current chains."""


ROWS_AHEAD_WITH_PROBABILITIES = 4
"""Rows computed ahead where probabilities may end a chain before its last token."""


@dataclass(frozen=True, slots=True)
class _ComputedRow:
    """One row of each chain that has been computed, and its result.

    Attributes:
        tokens: [chains] that were fed; None in the first rows, which have been fed for the caller.
        states: [chains, S] that a head's rows give to those that follow; of other models None.
    """

    tokens: list[int] | None
    found: NextTokens
    states: Tensor | None


class _Found(NamedTuple):
    """The result of a row on the device, not read yet."""

    logits: Tensor
    columns: Tensor
    tokens: Tensor
    probabilities: Tensor | None
    states: Tensor | None


class DeviceDraftSession(DraftSession):
    """Chains computed by `LanguageModel.forward`, up to `Pick.num_ahead` rows ahead.

    Args:
        model: whose rows are computed.
        caches: one a chain, without scratch.
        names: [columns] the tokens of columns of the logits, on the model's device; None: they are the same.
    """

    def __init__(self, model: LanguageModel, caches: Sequence[Cache], pick: Pick, names: Tensor | None = None) -> None:
        self._model = model
        self._pick = pick
        self._names = names
        self._caches: list[SequenceCache] = [
            cache_of(SequenceCache, cache)  # type: ignore[type-abstract]  # nothing is made of it
            for cache in caches
        ]
        self._states: Tensor | None = None
        self._rows: deque[_ComputedRow] = deque()
        self._left = pick.num_ahead

    @torch.inference_mode()
    def advance(self, tokens: Sequence[Sequence[int]], states: Tensor | None = None) -> NextTokens:
        """Feed tokens, which join the caches' scratch (`DraftSession.advance`)."""
        if self._rows and [list(each) for each in tokens] == [[token] for token in self._rows[0].tokens or ()]:
            for cache in self._caches:  # what these rows write lies there
                cache.feed([cache.num_scratch - 1])
        else:
            self._compute(tokens, states)
        row = self._rows.popleft()
        self._states = row.states
        return row.found

    def keep(self, indices: Sequence[int]) -> None:
        """Keep only these chains, in this order (`DraftSession.keep`)."""
        self._caches = [self._caches[index] for index in indices]
        if self._states is not None:
            self._states = self._states[list(indices)]
        self._rows = deque(_select_chains(row, indices) for row in self._rows)

    def _compute(self, tokens: Sequence[Sequence[int]], states: Tensor | None) -> None:
        """Compute the next row of each chain, and the rows ahead of it."""
        count = max(1, min(self._left, ROWS_AHEAD_WITH_PROBABILITIES) if self._pick.with_probability else self._left)
        self._left -= count
        parts = None if states is None else torch.split(states, [len(each) for each in tokens])
        rows = [
            Rows(cache, list(each), None, 1, states=self._state_of(i) if parts is None else parts[i])
            for i, (cache, each) in enumerate(zip(self._caches, tokens, strict=True))
        ]
        kept = [cache.num_scratch + len(each) for cache, each in zip(self._caches, tokens, strict=True)]
        found: list[_Found] = []
        for ahead in range(count):
            result = self._model.forward(rows)
            self._states = None if result.hidden_outputs is None else result.hidden_outputs[:, 0]
            found.append(_Found(result.logits, *self._picked(result.logits), self._states))
            if ahead < count - 1:
                next_ids = found[-1].tokens
                rows = [
                    Rows(cache, next_ids[i : i + 1], None, 1, states=self._state_of(i))
                    for i, cache in enumerate(self._caches)
                ]
        for cache, keep in zip(self._caches, kept, strict=True):
            cache.drop(keep)
        self._rows = deque(self._read(found))

    def _state_of(self, chain: int) -> Tensor | None:
        return None if self._states is None else self._states[chain : chain + 1]

    def _picked(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return on the device, each [chains]: the columns, -1 where a logit is not finite, the tokens that are fed for
        them, and their probabilities."""
        values = logits[:, : self._pick.num_columns]
        largest, columns = values.max(-1)
        columns = torch.where(largest.isfinite(), columns, -1)
        tokens = columns.clamp(min=0)
        tokens = tokens if self._names is None else self._names[tokens]
        if not self._pick.with_probability:
            return columns, tokens, None
        return columns, tokens, (largest - values.logsumexp(-1)).exp()

    def _read(self, found: Sequence[_Found]) -> list[_ComputedRow]:
        """Wait for the device, and read all results."""
        read: list[list[list[int]]] = torch.stack(
            [torch.stack([each.columns for each in found]), torch.stack([each.tokens for each in found])]
        ).tolist()
        columns, tokens = read
        accept_probs = [each.probabilities for each in found if each.probabilities is not None]
        probabilities = torch.stack(accept_probs).nan_to_num(0.0).tolist() if accept_probs else [None] * len(found)
        fed = [None, *tokens[:-1]]
        return [
            _ComputedRow(before, NextTokens(each.logits, picked, probability), each.states)
            for before, each, picked, probability in zip(fed, found, columns, probabilities, strict=True)
        ]


def _select_chains(row: _ComputedRow, indices: Sequence[int]) -> _ComputedRow:
    found = row.found
    accept_probs = None if found.probabilities is None else [found.probabilities[index] for index in indices]
    kept = NextTokens(found.logits[list(indices)], [found.columns[index] for index in indices], accept_probs)
    states = None if row.states is None else row.states[list(indices)]
    return _ComputedRow(None if row.tokens is None else [row.tokens[index] for index in indices], kept, states)


Ints = NDArray[np.int64]
Addresses = NDArray[np.uint64]


class NativeDraftSession(DraftSession):
    """Chains in paged caches, with their rows in the library's form.

    Args:
        caches: one a chain, without scratch.
        cos_sin: of queries and keys.
        num_outputs: columns of the logits.

    Raises:
        ValueError: a cache has scratch.
    """

    def __init__(
        self,
        library: Library,
        caches: Sequence[Cache],
        cos_sin: CosSinTables,
        num_outputs: int,
        pick: Pick,
    ) -> None:
        self._library = library
        self._cos_sin = cos_sin
        self._caches = [cache_of(PagedCache, cache) for cache in caches]
        if any(cache.num_scratch for cache in self._caches):
            raise ValueError("chains begin behind what is committed, and a cache has rows that are not")
        self._num_columns = pick.num_columns
        self._threads = torch.get_num_threads()
        self._logits = torch.empty(len(caches), num_outputs)
        self._columns = np.empty(len(caches), np.int64)
        self._probabilities = np.empty(len(caches), np.float32) if pick.with_probability else None
        self._pages: list[Addresses] = []
        self._allocate(len(caches))

    def resumes(self, caches: Sequence[Cache], pick: Pick) -> bool:
        """Return whether it may serve the next draft of these chains, too. Its arrays stay as they are then."""
        return (
            len(caches) == len(self._caches)
            and all(map(operator.is_, caches, self._caches))
            and not any(cache.num_scratch for cache in self._caches)
            and (pick.num_columns, pick.with_probability) == (self._num_columns, self._probabilities is not None)
            and self._threads == torch.get_num_threads()
        )

    def advance(self, tokens: Sequence[Sequence[int]], states: Tensor | None = None) -> NextTokens:
        """Feed tokens, which join the caches' scratch (`DraftSession.advance`)."""
        counts = [len(each) for each in tokens]
        num_rows = sum(counts)
        num_chains = len(counts)
        if num_rows > len(self._token_ids):
            self._allocate(num_rows)
        self._fill(tokens, counts)
        self._rows.num_rows = num_rows
        is_one_each = num_rows == num_chains
        last_rows = None if is_one_each else torch.tensor([end - 1 for end in accumulate(counts)])
        self._compute(num_rows, num_chains, last_rows, states)
        columns = self._columns[:num_chains]
        probabilities = self._probabilities
        self._library.argmax(
            self._logits.data_ptr(),
            num_chains,
            self._num_columns,
            self._logits.shape[1],
            columns.ctypes.data,
            None if probabilities is None else probabilities.ctypes.data,
        )
        accept_probs = None if probabilities is None else probabilities[:num_chains].tolist()
        return NextTokens(self._logits[:num_chains], columns.tolist(), accept_probs)

    def keep(self, indices: Sequence[int]) -> None:
        """Keep only these chains, in this order (`DraftSession.keep`)."""
        self._caches = [self._caches[index] for index in indices]
        self._pages = []

    @abstractmethod
    def _compute(self, num_rows: int, num_chains: int, last_rows: Tensor | None, states: Tensor | None) -> None:
        """Write the logits of the last row of each chain.

        Args:
            last_rows: [num_chains] int64, these rows; None: each chain has one.
            states: as of `advance`.
        """

    def _allocate(self, num_rows: int) -> None:
        """Allocate the arrays of so many rows, which have no tails."""
        self._token_ids = np.empty(num_rows, np.int64)
        self._sequence, self._position, self._prefix = (np.empty(num_rows, np.int32) for _ in range(3))
        self._nothing = np.zeros(num_rows + 1, np.int32)
        self._pages = []
        self._rows = RowsStruct(
            sequence=self._sequence.ctypes.data,
            position=self._position.ctypes.data,
            slot=self._position.ctypes.data,
            prefix=self._prefix.ctypes.data,
            tail_start=self._nothing.ctypes.data,
            tail=self._nothing.ctypes.data,
        )

    def _fill(self, tokens: Sequence[Sequence[int]], counts: Sequence[int]) -> None:
        """Add the rows to their caches' scratch, and fill the arrays."""
        sequences: list[int] = []
        positions: list[int] = []
        for index, (cache, count) in enumerate(zip(self._caches, counts, strict=True)):
            row = cache.num_scratch
            cache.feed(range(row - 1, row - 1 + count))
            first = cache.length + row
            sequences += [index] * count
            positions += range(first, first + count)
        num_rows = len(positions)
        self._sequence[:num_rows] = sequences
        self._position[:num_rows] = positions
        np.add(self._position[:num_rows], 1, out=self._prefix[:num_rows])
        self._token_ids[:num_rows] = [token_id for each in tokens for token_id in each]
        tables = self._cos_sin.reaching(max(positions) + 1)
        cos, sin, *others = [table.data_ptr() for table in tables]
        self._rows.cos = cos
        self._rows.sin = sin
        if others:
            self._rows.other_cos, self._rows.other_sin = others
        self._tables = tables  # the addresses are of these
        pages = [cache.addresses for cache in self._caches]
        if len(pages) != len(self._pages) or any(new is not old for new, old in zip(pages, self._pages, strict=True)):
            self._pages = pages
            self._addresses = pages[0] if len(pages) == 1 else np.concatenate(pages)
            self._page_start = np.array([*accumulate(map(len, pages), initial=0)], np.int32)
            self._rows.pages = self._addresses.ctypes.data
            self._rows.page_start = self._page_start.ctypes.data
