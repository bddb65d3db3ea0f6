"""Retrieval: what followed the last tokens in a corpus on disk, as a tree (REST; He et al., 2311.08252).

The longest n-gram at the sequence's end that the corpus holds is looked up, then shorter ones that occur more often.
Of all prefixes of what follows them there, the tree takes the most probable: how probable is measured, by how long the
match was and by how many of its occurrences agree.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np

from forerun.config import BUNDLED_INDEX
from forerun.drafters.base import Binding, OneByOne, Traits
from forerun.drafters.growth.ranked_tree import RankedTree
from forerun.drafters.lookup.rest.index import ContinuationTree, Index, best_nodes
from forerun.drafters.lookup.rest.index_file import IndexHeader
from forerun.errors import ConfigError, DrafterError, IncompatibleDrafterError
from forerun.speculation import Rates
from forerun.types import Draft, Sequence, Step
from forerun.utils.tree import ROOT, Tree
from forerun.utils.vocabulary import fingerprint

_LENGTHS = (3, 4, 5, 7, 9, 13)
"""Match lengths at which the next level of acceptance begins."""
_PRIORS = (0.02, 0.07, 0.1, 0.14, 0.2, 0.25, 0.37, 0.43, 0.5, 0.9)
"""Prior probability that a token is accepted, by its share of what followed the same n-gram in the corpus."""
_BINS = len(_PRIORS)
_AGAIN = 0.8
"""Factor on the prior of what only a shorter match gives."""
_DECAY = 0.995
"""Weight that earlier trials of a level keep at each new one."""


class Rest(OneByOne):
    """Drafts trees from a corpus of the target's tokens; no model, no training. Chosen, never drawn.

    Args:
        index: a file of `forerun index build`, or an open Index; None takes the bundled one, which is of the bundled
            target's tokens.
        min_ngram: tokens that must match (1 or more).
        max_ngram: tokens that may match at most (1 or more).
        num_matches: n-grams that are looked up: the longest that occurs, then ever shorter ones that occur in more
            positions (1 or more). 1 is REST as published; shorter ones fill the remaining nodes.
        max_places: positions of an n-gram that are read; of more, so many at even distances (1 or more).
        continuation: tokens that are read after each position: the tree's depth (1 or more).

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self,
        index: str | Path | Index | None = None,
        min_ngram: int = 2,
        max_ngram: int = 16,
        num_matches: int = 3,
        max_places: int = 500,
        continuation: int = 10,
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
        self._min = min_ngram
        self._max = max_ngram
        self._num_matches = num_matches
        self._max_places = max_places
        self._continuation = continuation
        self._index: Index | None = None
        self._rates = Rates(_all_priors(), decay=_DECAY)
        self._pending: dict[Sequence, tuple[int, RankedTree]] = {}  # length of the sequence, and its draft

    @property
    def index(self) -> Index:
        """Return the corpus. Raises DrafterError before `bind`."""
        if self._index is None:
            raise DrafterError("This Rest is not bound to a target yet. Give it to LLM(..., drafter=...).")
        return self._index

    @property
    def traits(self) -> Traits:
        size = 0 if self._index is None else self._index.header.num_tokens
        options = f"n-grams {self._min} to {self._max} num_matches={self._num_matches} max_places={self._max_places}"
        return Traits(("Rest", f"{size} tokens", options, f"continuation={self._continuation}"))

    @property
    def nbytes(self) -> int:
        """Return the bytes of the mapped file; pages that are not read take no memory."""
        return 0 if self._index is None else self._index.nbytes

    def bind(self, binding: Binding) -> None:
        """Open the index and see that its tokens are the target's.

        Raises:
            ConfigError: it cannot be read, is damaged, or is not sorted as deep as the options look.
            IncompatibleDrafterError: it is of another tokenizer's tokens.
        """
        target_fingerprint = fingerprint(binding.tokenizer)
        if isinstance(self._source, Index):
            self._check(self._source.header, target_fingerprint, binding)
            self._index = self._source
        else:
            self._index = Index(self._path, lambda header: self._check(header, target_fingerprint, binding))

    def start(self, sequence: Sequence) -> None:
        pass

    def stop(self, sequence: Sequence) -> None:
        self._pending.pop(sequence, None)

    def commit(self, steps: Seq[Step]) -> None:
        for step in steps:
            pending = self._pending.pop(step.sequence, None)
            if pending is not None:  # by the committed text alone, whichever drafter proposed it
                length, tree = pending
                tree.observe_tokens(self._rates, step.sequence.token_ids[length:])

    def _draft(self, sequence: Sequence, max_nodes: int, min_acceptance_prob: float) -> Draft:
        depth = min(self._continuation, sequence.room)
        index = self.index
        tail = sequence.token_ids[-self._max :]
        tree = RankedTree()
        nodes = dict[tuple[int, int], int]()
        match = index.find(tail, self._min, self._max)
        for step in range(self._num_matches):
            if match is None:
                break
            if step > 0 and (match := index.find_more(tail, self._min, match)) is None:
                break
            found = best_nodes(index.continuations(match, depth, self._max_places), index.header.marker, max_nodes)
            self._add(tree, nodes, found.tree, _levels(match.length, step > 0, found), min_acceptance_prob)
        if not len(tree):
            return Draft.empty()
        best = tree.part(tree.ranked(range(len(tree)))[:max_nodes])
        self._pending[sequence] = len(sequence.token_ids), best
        return Draft(best.token_ids, best.parents)

    def _add(
        self,
        tree: RankedTree,
        nodes: dict[tuple[int, int], int],
        found: Tree,
        levels: list[int],
        min_acceptance_prob: float,
    ) -> None:
        """Add new nodes whose probability is above the minimum; existing ones keep their probability.

        Args:
            nodes: (parent, token) -> node of `tree`.
            levels: of the nodes of `found`.
        """
        node_of = {ROOT: ROOT}
        for i, (token_id, above, level) in enumerate(zip(found.ids, found.parents, levels, strict=True)):
            parent = node_of.get(above)
            if parent is None:
                continue  # left out
            node = nodes.get((parent, token_id))
            if node is None:
                accept_prob = self._rates.rate(level) * tree.accept_prob(parent)
                if accept_prob <= min_acceptance_prob:
                    continue
                node = nodes[parent, token_id] = tree.add(token_id, parent, level, accept_prob)
            node_of[i] = node

    def _check(self, header: IndexHeader, target_fingerprint: str, binding: Binding) -> None:
        """Refuse an index of other tokens, or one that is not deep enough."""
        name = binding.target.name
        if header.fingerprint != target_fingerprint or header.vocab_size > binding.target.vocab_size:
            what = "The bundled index" if self._source is None else f"The index {self._path}"
            raise IncompatibleDrafterError(
                f"{what} holds tokens of another tokenizer ({header.tokenizer or 'unnamed'}) than that of {name}. "
                f"Build one: forerun index build corpus.index SOURCES... --tokenizer {name}, then "
                "drafter='rest:index=corpus.index'."
            )
        if self._max + self._continuation > header.depth:
            raise ConfigError(
                f"max_ngram is {self._max} and continuation {self._continuation}, but the index {self._path} is sorted "
                f"by {header.depth} tokens only. "
                f"Lower them, or build it with the key depth at {self._max + self._continuation}."
            )

    @property
    def _path(self) -> Path:
        source = BUNDLED_INDEX if self._source is None else self._source
        return source.path if isinstance(source, Index) else Path(source)


def _levels(length: int, again: bool, found: ContinuationTree) -> list[int]:
    """Return [n] the level that each node's acceptance is counted in, its parent given.

    One per match length, share of the continuations, and whether a longer match was looked at before. A share of few
    continuations counts for less than the same of many.
    """
    shares = found.counts / (found.parent_counts + 1)
    bins = np.minimum((shares * _BINS).astype(np.int64), _BINS - 1)
    levels: list[int] = (bins + _BINS * (bisect_right(_LENGTHS, length) + (len(_LENGTHS) + 1) * again)).tolist()
    return levels


def _all_priors() -> list[float]:
    return [
        factor * accept_prob for factor in (1.0, _AGAIN) for _ in range(len(_LENGTHS) + 1) for accept_prob in _PRIORS
    ]
