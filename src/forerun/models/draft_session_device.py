"""The draft session of a model on a device that runs asynchronously: rows are computed ahead of the reader.

Reading a token waits for the device, which then waits for the host. So of the rows whose tokens will be the most
probable ones, several are handed over before anything is read, each with the token ids that the row before has left on
the device; then all are read at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.kv_cache import SequenceCache
from forerun.models.attention.base import cache_of
from forerun.models.base import LanguageModel, Rows
from forerun.models.draft_session import DraftSession, NextTokens, Pick
from forerun.types import Cache

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
