"""Retrieval: what followed the last tokens in a corpus on disk, as a tree (REST; He et al., 2311.08252).

The longest n-gram at the sequence's end that the corpus holds is looked up; the tree is made of the most frequent
prefixes of what follows it there. What is never found again in the corpus costs a few binary searches, no more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from forerun.config import (
    BUNDLED_INDEX,
    REST_CONTINUATION,
    REST_MAX_MATCHES,
    REST_MAX_NGRAM,
    REST_MIN_NGRAM,
    REST_NUM_DRAFT_TOKENS,
)
from forerun.drafters.binding import Binding
from forerun.errors import ConfigError, DrafterError, IncompatibleDrafterError
from forerun.policy import Rates, bin_centres
from forerun.retrieval import Header, Index, Trie, best_nodes, fingerprint
from forerun.types import Draft, Sequence, Step

_LENGTHS = (3, 4, 5, 7, 9, 13)
"""Match lengths at which the next level of acceptance begins."""
_BINS = 10


@dataclass(frozen=True, slots=True)
class _Pending:
    """A draft whose fate is not known yet: what was proposed after `length` tokens, by node."""

    length: int
    token_ids: list[int]
    parents: list[int]
    levels: list[int]


class Rest:
    """Drafts trees from a corpus of the target's tokens; no model, no training. Chosen, never drawn.

    Args:
        index: a file of `forerun index build`, or an open Index; None takes the bundled one, which is of the bundled
            target's tokens.
        num_draft_tokens: nodes of the tree at most; None takes the engine's K.
        min_ngram, max_ngram: tokens that must, and may at most, match.
        max_matches: matches that are looked at; of more, so many at even distances.
        continuation: tokens that are taken after each match: the tree's depth.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self,
        index: str | Path | Index | None = None,
        num_draft_tokens: int | None = REST_NUM_DRAFT_TOKENS,
        min_ngram: int = REST_MIN_NGRAM,
        max_ngram: int = REST_MAX_NGRAM,
        max_matches: int = REST_MAX_MATCHES,
        continuation: int = REST_CONTINUATION,
    ) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ConfigError(
                f"min_ngram is {min_ngram} and max_ngram {max_ngram}, but 1 <= min_ngram <= max_ngram is needed."
            )
        if max_matches < 1 or continuation < 1:
            raise ConfigError(
                f"max_matches is {max_matches} and continuation {continuation}, but both must be at least 1."
            )
        self.num_draft_tokens = num_draft_tokens
        self._source = index
        self._min, self._max = min_ngram, max_ngram
        self._max_matches, self._continuation = max_matches, continuation
        self._index: Index | None = None
        self._rates = Rates(_priors())
        self._pending: dict[Sequence, _Pending] = {}

    @property
    def index(self) -> Index:
        """The corpus. Raises DrafterError before `bind`."""
        if self._index is None:
            raise DrafterError("This Rest is not bound to a target yet. Give it to LLM(..., drafter=...).")
        return self._index

    @property
    def nbytes(self) -> int:
        """The mapped file; pages that are not read take no memory."""
        return 0 if self._index is None else self._index.nbytes

    def bind(self, binding: Binding) -> None:
        """Open the index and see that its tokens are the target's.

        Raises:
            ConfigError: it cannot be read, is damaged, or is not sorted as deep as the options look.
            IncompatibleDrafterError: it is of another tokenizer's tokens.
        """
        own = fingerprint(binding.tokenizer)

        def check(header: Header) -> None:
            self._check(header, own, binding)

        if isinstance(self._source, Index):
            check(self._source.header)
            self._index = self._source
        else:
            self._index = Index(BUNDLED_INDEX if self._source is None else self._source, check)

    def start(self, sequence: Sequence) -> None:
        pass

    def stop(self, sequence: Sequence) -> None:
        self._pending.pop(sequence, None)

    def draft(self, sequences: Seq[Sequence], budgets: Seq[int], price: float = 0.0) -> list[Draft]:
        return [
            self._draft(sequence, budget, price) if budget > 0 else _EMPTY
            for sequence, budget in zip(sequences, budgets, strict=True)
        ]

    def commit(self, steps: Seq[Step]) -> None:
        for step in steps:
            pending = self._pending.pop(step.sequence, None)
            if pending is not None:
                self._learn(pending, step.sequence.token_ids[pending.length :])

    def _draft(self, sequence: Sequence, budget: int, price: float) -> Draft:
        depth = min(self._continuation, sequence.room)
        if depth < 1:
            return _EMPTY
        index = self.index
        match = index.find(sequence.token_ids[-self._max :], self._min, self._max)
        if match is None:
            return _EMPTY
        trie = best_nodes(index.continuations(match, depth, self._max_matches), index.header.marker, budget)
        levels, parents = _levels(match.length, trie).tolist(), trie.parents.tolist()
        kept = range(len(trie)) if price <= 0 else self._worth(levels, parents, price)
        if len(kept) < len(trie):
            place = {node: i for i, node in enumerate(kept)} | {-1: -1}
            levels = [levels[node] for node in kept]
            parents = [place[parents[node]] for node in kept]
        if not kept:
            return _EMPTY
        token_ids = trie.token_ids[list(kept)]
        self._pending[sequence] = _Pending(len(sequence.token_ids), token_ids.tolist(), parents, levels)
        return Draft(torch.from_numpy(token_ids), torch.tensor(parents))

    def _worth(self, levels: list[int], parents: list[int], price: float) -> list[int]:
        """The nodes whose chance, with that of all above them, exceeds the price."""
        rate = self._rates.rate
        chances: list[float] = []
        for level, parent in zip(levels, parents, strict=True):
            chances.append(rate(level) * (chances[parent] if parent >= 0 else 1.0))
        return [node for node, chance in enumerate(chances) if chance > price]

    def _learn(self, pending: _Pending, committed: list[int]) -> None:
        """Every child of a node that was committed is a trial; it is accepted if it is the token that came.

        That is so whoever proposed the tokens that came: the text alone decides.
        """
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(pending.parents):
            children.setdefault(parent, []).append(node)
        at = -1
        for token_id in committed:
            below, at = children.get(at, ()), -2
            for node in below:
                accepted = pending.token_ids[node] == token_id
                self._rates.observe(pending.levels[node], accepted)
                if accepted:
                    at = node

    def _check(self, header: Header, own: str, binding: Binding) -> None:
        """Refuse an index of other tokens, or one that is not deep enough."""
        name = binding.target.name
        if header.fingerprint != own or header.vocab_size > binding.target.vocab_size:
            what = "The bundled index" if self._source is None else f"The index {self._path}"
            raise IncompatibleDrafterError(
                f"{what} holds tokens of another tokenizer ({header.tokenizer or 'unnamed'}) than that of {name}. "
                f"Build one: forerun index build corpus.index SOURCES... --tokenizer {name}, then "
                "drafter='rest:index=corpus.index'."
            )
        if self._max + self._continuation > header.depth:
            raise ConfigError(
                f"max_ngram is {self._max} and continuation {self._continuation}, but the index {self._path} is sorted "
                f"by {header.depth} tokens only. Lower them, or build it with --depth {self._max + self._continuation}."
            )

    @property
    def _path(self) -> Path:
        source = BUNDLED_INDEX if self._source is None else self._source
        return source.path if isinstance(source, Index) else Path(source)


def _levels(length: int, trie: Trie) -> NDArray[np.int64]:
    """[n] which rate each node's acceptance counts for, its parent given.

    One per match length and share of the continuations; a share of few continuations counts for less than the same
    of many.
    """
    shares = trie.counts / (trie.parent_counts + 1)
    bins = np.minimum((shares * _BINS).astype(np.int64), _BINS - 1)
    return bins + _BINS * bisect_right(_LENGTHS, length)


def _priors() -> list[float]:
    return [share for _ in range(len(_LENGTHS) + 1) for share in bin_centres(_BINS)]


_EMPTY = Draft.empty()
