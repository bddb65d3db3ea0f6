"""Lookahead decoding: n-grams that the target itself produces in passing are proposed when their first token comes.

Fu and others, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", 2402.02057. In the forward
that verifies the guesses, the target also computes a window of probes, a Jacobi iteration over what might come; its
trajectories are the n-grams. Unlike the authors' program this keeps the bonus token after a guess that is right to its
end.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.config import MAX_NUM_DRAFT_TOKENS
from forerun.drafters.base import Binding, OneByOne, Traits
from forerun.drafters.ranked_tree import Child, RankedTree, best_tree
from forerun.drafters.target.jacobi import NgramPool, Window, window_parents
from forerun.errors import ConfigError
from forerun.policy import Rates
from forerun.tree import ROOT, Tree
from forerun.types import Draft, Needs, Sequence, Step

_CHANCES = (0.4, 0.7, 0.7)
"""Prior chance of the most recent guess's first token, and of each after it."""
MAX_NGRAMS = 2**14
"""N-grams that a sequence's pool may hold."""
_NGRAM_BYTES = 200
"""Of a tuple and its place in a dict; its tokens come on top."""


@dataclass(slots=True)
class _Asked:
    """What was drafted, until the target has computed it.

    Attributes:
        guesses: the tree of candidates.
        last_row: nodes of the window's last row, -1 for the last committed token.
    """

    draft: Draft
    guesses: RankedTree
    last_row: list[int]


@dataclass(slots=True)
class _State:
    pool: NgramPool
    window: Window | None = None
    num_indexed: int = 0
    asked: _Asked | None = None


class Lookahead(OneByOne):
    """Drafts n-grams that the target itself has made; no model, no training. Chosen, never drawn.

    Args:
        window: W, columns of the window; each costs ngram - 1 rows of every forward (1 or more).
        ngram: N, tokens of an n-gram, its first included (2 or more).
        guesses: G, n-grams kept of each first token, and proposed at most (1 or more).
        prompt_pool: n-grams of the prompt are guesses too.
        verify_window: what stands in the window may be accepted as well; it is computed anyway. Steps of the bundled
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
        self._width, self._num_rows, self._guesses, self._prompt_pool = window, ngram - 1, guesses, prompt_pool
        self._verify_window = verify_window
        self._end_of_text: frozenset[int] = frozenset()
        # by depth, and by rank among siblings, which are in the order of their guesses
        self._rates = Rates([chance / rank for chance in _CHANCES for rank in range(1, guesses + 1)])
        self._states: dict[Sequence, _State] = {}

    def bind(self, binding: Binding) -> None:
        self._end_of_text = frozenset(binding.target.eos_token_ids)

    @property
    def traits(self) -> Traits:
        options = (
            f"window={self._width} ngram={self._num_rows + 1} guesses={self._guesses} "
            f"prompt_pool={self._prompt_pool} verify_window={self._verify_window}"
        )
        return Traits((type(self).__name__, options), whole_draft=self._whole_draft)

    @property
    def nbytes(self) -> int:
        """Bytes of all pools, nearly."""
        return sum(len(state.pool) for state in self._states.values()) * (_NGRAM_BYTES + 8 * self._num_rows)

    def start(self, sequence: Sequence) -> None:
        self._states[sequence] = _State(NgramPool(self._guesses, MAX_NGRAMS))

    def stop(self, sequence: Sequence) -> None:
        self._states.pop(sequence, None)

    def commit(self, steps: Seq[Step]) -> None:
        for step in steps:
            state = self._states[step.sequence]
            asked, state.asked = state.asked, None
            if asked is not None and asked.draft is step.draft:
                self._learn(state, asked, step)
            if self._prompt_pool:
                self._index(state, step)

    def _draft(self, sequence: Sequence, budget: int, price: float) -> Draft:
        state = self._states[sequence]
        guesses = self._guess(state.pool, sequence, budget, price)
        if state.window is None:
            prompt = sequence.token_ids[: sequence.num_prompt]
            filler = [each for each in prompt if each not in self._end_of_text] or prompt
            state.window = Window(self._width, self._num_rows, filler, sequence.num_prompt)
        n = len(guesses)
        # a column is num_rows nodes, less the root; the last row of column j stands num_rows - 1 + j deep
        columns = min(self._width, (budget - n + 1) // self._num_rows, sequence.room - self._num_rows + 2)
        last_row: list[int] = []
        token_ids, parents = guesses.ids, guesses.parents
        if columns > 0:
            below, last_row = window_parents(columns, self._num_rows)
            token_ids = token_ids + state.window.token_ids(columns)
            parents = parents + [n + parent if parent >= 0 else -1 for parent in below]
            last_row = [n + node if node >= 0 else -1 for node in last_row]
        draft = Draft(token_ids, parents, num_candidates=len(token_ids) if self._verify_window else n)
        state.asked = _Asked(draft, guesses, last_row)
        return draft

    def _guess(self, pool: NgramPool, sequence: Sequence, budget: int, price: float) -> RankedTree:
        tree = Tree()
        for ngram in pool.find(sequence.token_ids[-1]):
            tree.graft(ngram)
        below = tree.children()

        def children(node: int, depth: int) -> list[Child[int]]:
            first = min(depth, len(_CHANCES) - 1) * self._guesses
            found = [
                Child(self._rates.rate(level), tree.ids[child], level, child)
                for level, child in enumerate(below[node + 1], first)
            ]
            found.sort(key=lambda child: -child.chance)
            return found

        return best_tree(ROOT, children, budget, min(self._num_rows, sequence.room), price)

    def _learn(self, state: _State, asked: _Asked, step: Step) -> None:
        assert step.verdict is not None
        ids, path = asked.draft.ids, step.verdict.path  # with verify_window the path may not be one of guesses
        asked.guesses.observe_tokens(self._rates, [*(ids[node] for node in path), step.verdict.next_token])
        if step.top_tokens is None or state.window is None:
            return
        n, best = len(asked.draft), step.top_tokens[:, 0].tolist()
        last_token = step.sequence.token_ids[-len(step.verdict.path) - 2]
        computed = [best[node - n] for node in asked.last_row]
        for head, rest in state.window.advance(last_token, computed, self._end_of_text):
            state.pool.push(head, rest)

    def _index(self, state: _State, step: Step) -> None:
        """Put the n-grams of the prompt, as far as it is computed, into the pool."""
        token_ids, size = step.sequence.token_ids, self._num_rows
        end = min(step.num_computed, step.sequence.num_prompt)
        for at in range(state.num_indexed, end - size):
            state.pool.push(token_ids[at], tuple(token_ids[at + 1 : at + 1 + size]))
            state.num_indexed = at + 1
