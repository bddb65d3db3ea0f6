"""Retrieval: what followed the last tokens in a corpus on disk, as a tree (REST; He et al., 2311.08252).

The longest n-gram at the sequence's end that the corpus holds is looked up, then shorter ones that occur more often.
Of all prefixes of what follows them there, the tree takes the most probable: how probable is learned, by how long the
match was and by how many of its places agree.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forerun.config import (
    BUNDLED_INDEX,
    REST_AGAIN,
    REST_CHANCES,
    REST_CONTINUATION,
    REST_DECAY,
    REST_MAX_NGRAM,
    REST_MAX_PLACES,
    REST_MIN_NGRAM,
    REST_NUM_MATCHES,
)
from forerun.drafters.base import Binding, Drafter
from forerun.errors import ConfigError, DrafterError, IncompatibleDrafterError
from forerun.policy import Rates
from forerun.retrieval import Header, Index, Trie, best_nodes, fingerprint
from forerun.types import Draft, Sequence, Step

_LENGTHS = (3, 4, 5, 7, 9, 13)
"""Match lengths at which the next level of acceptance begins."""
_BINS = len(REST_CHANCES)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A draft whose fate is not known yet: what was proposed after `length` tokens, by node."""

    length: int
    token_ids: list[int]
    parents: list[int]
    levels: list[int]


class _Tree:
    """Nodes of several tries, each with its chance: that it and all above it are accepted."""

    __slots__ = ("_chances", "_levels", "_nodes", "_parents", "_token_ids")

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}  # parent and token -> node
        self._token_ids: list[int] = []
        self._parents: list[int] = []
        self._levels: list[int] = []
        self._chances: list[float] = []

    def add(self, trie: Trie, levels: NDArray[np.int64], rates: Rates, price: float) -> None:
        """Add what is not there yet and worth more than the price; what is there keeps its chance."""
        nodes, chances = self._nodes, self._chances
        place = [-1] * len(trie) + [-1]  # the last is that of parent -1
        rejected = -2
        columns = zip(trie.token_ids.tolist(), trie.parents.tolist(), levels.tolist(), strict=True)
        for i, (token_id, above, level) in enumerate(columns):
            parent = place[above]
            node = nodes.get((parent, token_id))
            if node is None:
                chance = 0.0 if parent == rejected else rates.rate(level) * (chances[parent] if parent >= 0 else 1.0)
                if parent == rejected or chance <= price:
                    place[i] = rejected
                    continue
                node = nodes[parent, token_id] = len(chances)
                self._token_ids.append(token_id)
                self._parents.append(parent)
                self._levels.append(level)
                chances.append(chance)
            place[i] = node

    def best(self, count: int, length: int) -> tuple[_Pending, Draft]:
        """The most probable nodes, most probable first; no child is more probable than its parent, which is older."""
        order = sorted(range(len(self._chances)), key=lambda node: (-self._chances[node], node))[:count]
        place = {node: i for i, node in enumerate(order)} | {-1: -1}
        token_ids = [self._token_ids[node] for node in order]
        parents = [place[self._parents[node]] for node in order]
        pending = _Pending(length, token_ids, parents, [self._levels[node] for node in order])
        if not order:
            return pending, _EMPTY
        return pending, Draft(token_ids, parents)


class Rest(Drafter):
    """Drafts trees from a corpus of the target's tokens; no model, no training. Chosen, never drawn.

    Args:
        index: a file of `forerun index build`, or an open Index; None takes the bundled one, which is of the bundled
            target's tokens.
        min_ngram, max_ngram: tokens that must, and may at most, match.
        num_matches: n-grams that are looked up: the longest that occurs, then ever shorter ones that occur in more
            places. 1 is REST as published; what shorter ones add fills the rest of the budget.
        max_places: places of an n-gram that are looked at; of more, so many at even distances.
        continuation: tokens that are taken after each place: the tree's depth.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self,
        index: str | Path | Index | None = None,
        min_ngram: int = REST_MIN_NGRAM,
        max_ngram: int = REST_MAX_NGRAM,
        num_matches: int = REST_NUM_MATCHES,
        max_places: int = REST_MAX_PLACES,
        continuation: int = REST_CONTINUATION,
    ) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ConfigError(
                f"min_ngram is {min_ngram} and max_ngram {max_ngram}, but 1 <= min_ngram <= max_ngram is needed."
            )
        if num_matches < 1 or max_places < 1 or continuation < 1:
            raise ConfigError(
                f"num_matches is {num_matches}, max_places {max_places} and continuation {continuation}, but each must "
                "be at least 1."
            )
        self._source = index
        self._min, self._max = min_ngram, max_ngram
        self._num_matches, self._max_places, self._continuation = num_matches, max_places, continuation
        self._index: Index | None = None
        self._rates = Rates(_priors(), decay=REST_DECAY)
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
        index, tail, tree = self.index, sequence.token_ids[-self._max :], _Tree()
        match = index.find(tail, self._min, self._max)
        for step in range(self._num_matches):
            if match is None:
                break
            if step > 0 and (match := index.find_more(tail, self._min, match)) is None:
                break
            trie = best_nodes(index.continuations(match, depth, self._max_places), index.header.marker, budget)
            tree.add(trie, _levels(match.length, step > 0, trie), self._rates, price)
        pending, draft = tree.best(budget, len(sequence.token_ids))
        if pending.token_ids:
            self._pending[sequence] = pending
        return draft

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


def _levels(length: int, again: bool, trie: Trie) -> NDArray[np.int64]:
    """[n] which rate each node's acceptance counts for, its parent given.

    One per match length, share of the continuations, and whether a longer match was looked at before. A share of few
    continuations counts for less than the same of many.
    """
    shares = trie.counts / (trie.parent_counts + 1)
    bins = np.minimum((shares * _BINS).astype(np.int64), _BINS - 1)
    return bins + _BINS * (bisect_right(_LENGTHS, length) + (len(_LENGTHS) + 1) * again)


def _priors() -> list[float]:
    return [
        factor * chance for factor in (1.0, REST_AGAIN) for _ in range(len(_LENGTHS) + 1) for chance in REST_CHANCES
    ]


_EMPTY = Draft.empty()
