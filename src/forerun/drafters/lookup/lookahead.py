"""Lookahead decoding: n-grams that the target itself produces in passing are proposed when their first token comes.

Fu and others, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", 2402.02057. In the forward
that verifies the candidates, the target also computes a window of probes, a Jacobi iteration over what might come; its
trajectories are the n-grams. Unlike the authors' program this keeps the bonus token after a candidate that is right to
its end.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from forerun.config import MAX_NUM_DRAFT_TOKENS
from forerun.drafters.base import Binding, OneByOne, Traits
from forerun.drafters.growth.ranked_tree import Child, RankedTree, best_tree
from forerun.errors import ConfigError
from forerun.speculation import Rates
from forerun.types import Draft, Needs, Sequence, Step
from forerun.utils.tree import ROOT, Tree

Ngram = tuple[int, ...]


class NgramPool:
    """The n-grams that began with each token, the most recently seen ones.

    Args:
        per_token: G, n-grams kept of a token.
        max_ngrams: n-grams kept in all; beyond, the token whose n-grams were renewed least recently loses them.
    """

    __slots__ = ("_max", "_per_token", "_pool", "_size")

    def __init__(self, per_token: int, max_ngrams: int) -> None:
        self._per_token = per_token
        self._max = max_ngrams
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
        """Return what followed a token, most recent first."""
        return list(self._pool.get(token_id, ()))[::-1]


@lru_cache(maxsize=1024)
def window_parents(columns: int, num_rows: int) -> tuple[list[int], list[int]]:
    """Lay the window out as nodes of a tree, row by row; column 0 of row 0 is the root, -1.

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


class LookaheadWindow:
    """W columns of num_rows = N - 1 tokens: the last iterates of a Jacobi iteration, the oldest in row 0.

    Each column begins as a piece of the prompt, and gives an n-gram once all below its row 0 was computed.

    Args:
        filler: tokens to begin with, not empty; they also stand in for ends of text.
        seed: of the choice among them.
    """

    __slots__ = ("_ages", "_columns", "_filler", "_num_rows", "_random")

    def __init__(self, width: int, num_rows: int, filler: Seq[int], seed: int) -> None:
        self._num_rows = num_rows
        self._filler = filler
        self._random = Random(seed)
        self._columns = [self._piece() for _ in range(width)]
        self._ages = [0] * width

    def token_ids(self, columns: int) -> list[int]:
        """Return the tokens of the first columns, row by row, without column 0 of row 0, which is the last committed
        token."""
        return [column[row] for row in range(self._num_rows) for column in self._columns[:columns]][1:]

    def advance(self, last_token: int, computed: Seq[int], end_of_text: frozenset[int]) -> list[tuple[int, Ngram]]:
        """Take over the target's tokens after the last row of the first columns, and drop their row 0.

        Args:
            last_token: what stood in row 0, column 0.
            computed: tokens for the first len(computed) columns; the others stay as they are.
            end_of_text: tokens after which nothing can be predicted.

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


_PRIORS = (0.4, 0.7, 0.7)
"""Prior probability of the most recent candidate's first token, and of each after it."""
MAX_NGRAMS = 2**14
"""N-grams that a sequence's pool may hold."""
_NGRAM_BYTES = 200
"""Bytes of a tuple and its slot in a dict; its tokens come on top."""


@dataclass(slots=True)
class PendingDraft:
    """A draft that the target has not computed yet.

    Attributes:
        candidates: the tree of candidates.
        last_row: nodes of the window's last row, -1 for the last committed token.
    """

    draft: Draft
    candidates: RankedTree
    last_row: list[int]


@dataclass(slots=True)
class LookaheadState:
    pool: NgramPool
    window: LookaheadWindow | None = None
    num_indexed: int = 0
    pending: PendingDraft | None = None


class Lookahead(OneByOne):
    """Drafts n-grams that the target itself has made; no model, no training. Chosen, never drawn.

    Args:
        window: W, columns of the window; each costs ngram - 1 rows of every forward (1 or more).
        ngram: N, tokens of an n-gram, its first included (2 or more).
        guesses: G, n-grams kept of each first token, and proposed at most (1 or more).
        prompt_pool: n-grams of the prompt are proposed too.
        verify_window: tokens of the window may be accepted as well; it is computed anyway. Steps of the bundled
            pair took 2 to 4 % longer. The authors leave it out, and its nodes count as drafted then.

    Raises:
        ConfigError: an option is out of range, or together they ask for more than MAX_NUM_DRAFT_TOKENS rows.
    """

    needs = Needs(top_tokens=1)

    def __init__(
        self,
        window: int = 4,
        ngram: int = 3,
        guesses: int = 4,
        prompt_pool: bool = True,
        verify_window: bool = False,
    ) -> None:
        for name, value, least in (("window", window, 1), ("ngram", ngram, 2), ("guesses", guesses, 1)):
            if value < least:
                raise ConfigError(f"{name} is {value}, but must be at least {least}. Leave it out for the default.")
        rows = (ngram - 1) * (window + guesses)
        if rows > MAX_NUM_DRAFT_TOKENS:
            raise ConfigError(
                f"window {window}, ngram {ngram} and guesses {guesses} ask for {rows} rows of every forward, but at "
                f"most {MAX_NUM_DRAFT_TOKENS} are computed: (ngram - 1) * (window + guesses). Lower one of them."
            )
        self._whole_draft = rows - 1
        self._num_probes = 0 if verify_window else (ngram - 1) * window - 1
        self._width = window
        self._num_rows = ngram - 1
        self._guesses = guesses
        self._prompt_pool = prompt_pool
        self._verify_window = verify_window
        self._end_of_text: frozenset[int] = frozenset()
        # by depth, and by rank among siblings, which are in the order of their n-grams
        self._rates = Rates([accept_prob / rank for accept_prob in _PRIORS for rank in range(1, guesses + 1)])
        self._states: dict[Sequence, LookaheadState] = {}

    def bind(self, binding: Binding) -> None:
        self._end_of_text = frozenset(binding.target.eos_token_ids)

    @property
    def traits(self) -> Traits:
        options = (
            f"window={self._width} ngram={self._num_rows + 1} guesses={self._guesses} "
            f"prompt_pool={self._prompt_pool} verify_window={self._verify_window}"
        )
        return Traits(("Lookahead", options), self._whole_draft, num_probes=self._num_probes)

    @property
    def nbytes(self) -> int:
        """Return the approximate bytes of all pools."""
        return sum(len(state.pool) for state in self._states.values()) * (_NGRAM_BYTES + 8 * self._num_rows)

    def start(self, sequence: Sequence) -> None:
        self._states[sequence] = LookaheadState(NgramPool(self._guesses, MAX_NGRAMS))

    def stop(self, sequence: Sequence) -> None:
        self._states.pop(sequence, None)

    def commit(self, steps: Seq[Step]) -> None:
        for step in steps:
            state = self._states[step.sequence]
            pending = state.pending
            state.pending = None
            if pending is not None and pending.draft is step.draft:
                self._learn(state, pending, step)
            if self._prompt_pool:
                self._index(state, step)

    def _draft(self, sequence: Sequence, max_nodes: int, min_acceptance_prob: float) -> Draft:
        state = self._states[sequence]
        most = max_nodes - self._num_probes if max_nodes > self._num_probes else max_nodes
        guesses = self._candidates(state.pool, sequence, most, min_acceptance_prob)
        if state.window is None:
            prompt = sequence.token_ids[: sequence.num_prompt]
            filler = [each for each in prompt if each not in self._end_of_text] or prompt
            state.window = LookaheadWindow(self._width, self._num_rows, filler, sequence.num_prompt)
        n = len(guesses)
        # a column is num_rows nodes, less the root; the last row of column j stands num_rows - 1 + j deep
        columns = min(self._width, (max_nodes - n + 1) // self._num_rows, sequence.room - self._num_rows + 2)
        last_row: list[int] = []
        token_ids = guesses.ids
        parents = guesses.parents
        if columns > 0:
            below, last_row = window_parents(columns, self._num_rows)
            token_ids = token_ids + state.window.token_ids(columns)
            parents = parents + [n + parent if parent >= 0 else -1 for parent in below]
            last_row = [n + node if node >= 0 else -1 for node in last_row]
        draft = Draft(token_ids, parents, num_candidates=len(token_ids) if self._verify_window else n)
        state.pending = PendingDraft(draft, guesses, last_row)
        return draft

    def _candidates(
        self, pool: NgramPool, sequence: Sequence, max_nodes: int, min_acceptance_prob: float
    ) -> RankedTree:
        tree = Tree()
        for ngram in pool.find(sequence.token_ids[-1]):
            tree.graft(ngram)
        below = tree.children()

        def children(node: int, depth: int) -> list[Child[int]]:
            first = min(depth, len(_PRIORS) - 1) * self._guesses
            found = [
                Child(self._rates.rate(level), tree.ids[child], level, child)
                for level, child in enumerate(below[node + 1], first)
            ]
            found.sort(key=lambda child: -child.accept_prob)
            return found

        return best_tree(ROOT, children, max_nodes, min(self._num_rows, sequence.room), min_acceptance_prob)

    def _learn(self, state: LookaheadState, pending: PendingDraft, step: Step) -> None:
        assert step.verdict is not None
        # with verify_window the path may not be one of candidates
        ids = pending.draft.ids
        path = step.verdict.path
        pending.candidates.observe_tokens(self._rates, [*(ids[node] for node in path), step.verdict.next_token])
        if step.top_tokens is None or state.window is None:
            return
        n = len(pending.draft)
        best = step.top_tokens[:, 0].tolist()
        last_token = step.sequence.token_ids[-len(step.verdict.path) - 2]
        computed = [best[node - n] for node in pending.last_row]
        for head, rest in state.window.advance(last_token, computed, self._end_of_text):
            state.pool.push(head, rest)

    def _index(self, state: LookaheadState, step: Step) -> None:
        """Put the n-grams of the prompt, as far as it is computed, into the pool."""
        token_ids = step.sequence.token_ids
        size = self._num_rows
        end = min(step.num_computed, step.sequence.num_prompt)
        for at in range(state.num_indexed, end - size):
            state.pool.push(token_ids[at], tuple(token_ids[at + 1 : at + 1 + size]))
            state.num_indexed = at + 1
