"""The draft session of the native kernels: a few calls per row, with no tensor operation between them.

A small model's row takes the kernels less time than the preparation of a forward from any rows, trees among them, takes
Python. Here the arrays of a forward are filled in place, and its results are written where the last ones were.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.kernels.cpu.library import Library, RowsStruct
from forerun.kv_cache import PagedCache
from forerun.models.attention.base import cache_of
from forerun.models.draft_session import DraftSession, NextTokens, Pick
from forerun.models.rope import CosSinTables
from forerun.types import Cache

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
