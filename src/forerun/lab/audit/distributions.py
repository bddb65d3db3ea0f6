"""The target's own laws: the distribution of the next token after some, each computed alone, and of short
continuations.

The reference of everything statistical. A law is computed by teacher forcing: a prompt in a cache, and the tokens after
it as one chain, which is dropped again. There is no draft, no tree, no batch and no rollback in it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
import torch
from torch import Tensor

from forerun.config import SamplingParams
from forerun.drafters import Drafter, Traits
from forerun.lab.audit.statistics import Numbers
from forerun.models import LanguageModel, Rows
from forerun.sampling import LogitsPipeline, LogitsRow, draw_tokens
from forerun.types import Draft, Sequence, Step

Path = tuple[int, ...]
"""Tokens after a prompt."""

MOST_CHILDREN = 8
"""Tokens of a law that get cells of their own; the others share one."""
LEAST_CHANCE = 0.01
"""A token less probable than this gets none."""
_CHUNK = 256


class Laws:
    """The laws after one prompt.

    Args:
        prompt: token ids, at least one.
    """

    def __init__(self, target: LanguageModel, prompt: Seq[int]) -> None:
        self.target, self.prompt = target, list(prompt)
        self._pipeline = LogitsPipeline(target.vocab_size, target.eos_token_ids)
        self._logits: dict[Path, Tensor] = {}
        self._cache = target.new_cache()
        with torch.inference_mode():
            for start in range(0, len(self.prompt) - 1, _CHUNK):
                chunk = self.prompt[start : min(start + _CHUNK, len(self.prompt) - 1)]
                target.forward([Rows(self._cache, chunk, num_logits=0)])
                self._cache.commit(range(len(chunk)))

    def logits(self, path: Path) -> Tensor:
        """[V] of the token after the prompt and these tokens, as the model gives them."""
        if path not in self._logits:
            with torch.inference_mode():
                rows = Rows(self._cache, [self.prompt[-1], *path], num_logits=1)
                self._logits[path] = self.target.forward([rows]).logits[0].clone()
                self._cache.drop()
        return self._logits[path]

    def logprobs(self, path: Path, params: SamplingParams) -> Tensor:
        """[V] log-probabilities of the same under a request's options."""
        sequence = Sequence(0, [*self.prompt, *path], len(self.prompt), params)
        with torch.inference_mode():
            processed = self._pipeline.process(self.logits(path)[None], [LogitsRow(sequence)])[0]
        self._pipeline.stop(sequence)
        return processed

    def law(self, path: Path, params: SamplingParams) -> Numbers:
        """[V] probabilities of the same, in float64."""
        chances: Numbers = self.logprobs(path, params).double().exp().cpu().numpy()
        chances /= chances.sum()
        return chances

    def close(self) -> None:
        """Give the cache's memory back."""
        self._cache.free()


@dataclass(frozen=True, slots=True)
class Opened:
    """A path whose next token is looked at.

    Attributes:
        law: [V] of the next token.
        children: the tokens that are told apart; all others are one.
    """

    law: Numbers
    children: frozenset[int]


class ContinuationCells:
    """Cells that short continuations of a prompt fall into, with their exact probabilities.

    The cells are the leaves of a tree of tokens that is opened where it is most probable, and at each opened path one
    more for all tokens without a branch. The last cell is for what cannot be: an answer that ended early.

    Args:
        length: tokens of an answer.
        num_opened: paths whose law is computed, at most.
        ends: tokens that end an answer.
    """

    def __init__(
        self, laws: Laws, params: SamplingParams, length: int, num_opened: int, ends: frozenset[int] = frozenset()
    ) -> None:
        self.opened: dict[Path, Opened] = {}
        self._cells: dict[tuple[Path, bool], int] = {}
        chances: list[float] = []

        def add_cell(path: Path, is_rest: bool, chance: float) -> None:
            self._cells[path, is_rest] = len(chances)
            chances.append(chance)

        leaves: list[tuple[float, Path]] = [(-1.0, ())]
        while leaves and len(self.opened) < num_opened:
            negative, path = heapq.heappop(leaves)
            if len(path) == length or (path and path[-1] in ends):
                add_cell(path, False, -negative)
                continue
            law = laws.law(path, params)
            children = [int(token) for token in np.argsort(-law, kind="stable")[:MOST_CHILDREN]]
            children = [token for token in children if law[token] >= LEAST_CHANCE]
            self.opened[path] = Opened(law, frozenset(children))
            rest = law.copy()
            rest[children] = 0  # exactly nothing where the options leave no other token
            add_cell(path, True, -negative * float(rest.sum()))
            for token in children:
                heapq.heappush(leaves, (negative * float(law[token]), (*path, token)))
        for negative, path in sorted(leaves, key=lambda leaf: leaf[1]):
            add_cell(path, False, -negative)
        self.probabilities = np.array([*chances, 0.0])

    def cell(self, token_ids: Seq[int]) -> int:
        """The cell of an answer."""
        path: Path = ()
        for token in token_ids:
            opened = self.opened.get(path)
            if opened is None:
                break
            if token not in opened.children:
                return self._cells[path, True]
            path = (*path, token)
        return self._cells.get((path, False), len(self.probabilities) - 1)

    def counts(self, answers: Seq[Seq[int]]) -> Numbers:
        """[cells] how many of the answers fall into each."""
        cells = [self.cell(answer) for answer in answers]
        return np.bincount(cells, minlength=len(self.probabilities)).astype(np.float64)


# Drafts drawn from laws that are known, for targets whose drafter draws nothing: from the target's own, distorted.
#
# Rejection is exact whatever the drafts are drawn from, as long as that is told; so any law will do that overlaps
# with
# the target's and differs from it. What is drawn here costs no model.

FLATTER = 0.6
"""The power to which a law's probabilities are raised."""
SPREAD = 0.7
"""Standard deviation of what is added to their logarithms."""
SHARE_OF_OTHERS = 0.2
"""Of a distorted law, the part that comes from the unprocessed law after the prompt: tokens that the target's options
may leave no chance."""


def distorted(law: Numbers, other: Numbers, rng: np.random.Generator) -> Numbers:
    """A law near another one. law, other: [V] probabilities."""
    weights = np.zeros_like(law)
    possible = law > 0
    noise = rng.normal(0.0, SPREAD, int(possible.sum()))
    weights[possible] = np.exp(FLATTER * np.log(law[possible]) + noise)
    mixed: Numbers = (1 - SHARE_OF_OTHERS) * weights / weights.sum() + SHARE_OF_OTHERS * other
    mixed /= mixed.sum()
    return mixed


class DrawnDrafts(Drafter):
    """Draws chains from distorted laws of the continuations that cells are made of.

    Args:
        known: prompt -> its continuations.
        laws: prompt -> its laws.
        seed: of the draws; never that of the engine's noise.
    """

    def __init__(
        self,
        known: dict[Path, ContinuationCells],
        laws: dict[Path, Laws],
        seed: int,
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._tables: dict[Path, dict[Path, Tensor]] = {}
        for prompt, continuations in known.items():
            other = laws[prompt].law((), SamplingParams())
            self._tables[prompt] = {
                path: torch.from_numpy(distorted(opened.law, other, self._rng)).float()
                for path, opened in continuations.opened.items()
            }

    @property
    def traits(self) -> Traits:
        """Costs nothing that need be stored."""
        return Traits(("DrawnDrafts",))

    def start(self, sequence: Sequence) -> None:
        """Nothing is kept of a sequence."""

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        """A chain for each."""
        return [self._draft(one, min(most, one.room)) for one, most in zip(sequences, num_draft_tokens, strict=True)]

    def commit(self, steps: Seq[Step]) -> None:
        """Nothing is learned."""

    def stop(self, sequence: Sequence) -> None:
        """Nothing is kept of a sequence."""

    def _draft(self, sequence: Sequence, budget: int) -> Draft:
        table = self._tables.get(tuple(sequence.token_ids[: sequence.num_prompt]))
        if table is None or budget <= 0:
            return Draft.empty()
        path = tuple(sequence.output_ids)
        tokens: list[int] = []
        rows: list[Tensor] = []
        for _ in range(budget):
            rows.append(_law_at(table, (*path, *tokens)))
            uniform = torch.rand(1, dtype=torch.float64, generator=self._generator)
            tokens.append(int(draw_tokens(rows[-1][None], uniform)))
        return Draft.chain(tokens, torch.stack([*rows, rows[-1]]))


def _law_at(table: dict[Path, Tensor], path: Path) -> Tensor:
    """The law after a path, or after as much of it as one is known for."""
    while path not in table:
        path = path[:-1]
    return table[path]


# Laws of the user's model over a handful of symbols, kept in tables, and drafts drawn from laws near them.
#
# A symbol is one of the three most probable tokens at its place, or all others together. After a prompt, three
# tokens
# have 64 cells, whose probabilities are exact; and an acceptance rule can be tried on them a million times, since
# no
# model is asked any more.

NUM_SYMBOLS = 4
LENGTH = 3
"""Symbols that a step of these drafts writes at most: two accepted, and one more."""

Contexts = Mapping[tuple[int, ...], Numbers]
"""Symbols so far -> [NUM_SYMBOLS] the law of the next."""
Shape = tuple[int, ...]
"""Parents of a draft's nodes."""

CHAIN: Shape = (-1, 0)
TREE: Shape = (-1, -1, 0, 0)


@dataclass(frozen=True, slots=True)
class LawSet:
    """The target's laws after one prompt, and laws that drafts are drawn from.

    Attributes:
        target, draft: of every string of fewer than LENGTH symbols.
    """

    target: Contexts
    draft: Contexts

    def chance(self, string: Seq[int]) -> float:
        """The target's probability of a string of at most LENGTH symbols."""
        return prod(float(self.target[tuple(string[:place])][symbol]) for place, symbol in enumerate(string))

    @property
    def cells(self) -> Numbers:
        """[NUM_SYMBOLS ** LENGTH] the probability of every string of LENGTH symbols, in lexicographic order."""
        return np.array([self.chance(string) for string in product(range(NUM_SYMBOLS), repeat=LENGTH)])


def law_set(laws: Laws, params: SamplingParams, rng: np.random.Generator) -> LawSet:
    """The laws after a prompt under a request's options, reduced to symbols."""
    target: dict[tuple[int, ...], Numbers] = {}
    draft: dict[tuple[int, ...], Numbers] = {}
    tokens: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    for depth in range(LENGTH):
        for string in product(range(NUM_SYMBOLS), repeat=depth):
            law = laws.law(tokens[string], params)
            order = np.argsort(-laws.law(tokens[string], SamplingParams()), kind="stable")[:NUM_SYMBOLS]
            rest = law.copy()
            rest[order[:-1]] = 0
            reduced = np.array([*law[order[:-1]], rest.sum()])
            target[string] = reduced / reduced.sum()
            even = np.full(NUM_SYMBOLS, 1 / NUM_SYMBOLS)
            draft[string] = distorted(target[string], even, rng)
            if rng.random() < 0.25:  # what a draft's filter drops
                draft[string][int(np.argmin(draft[string]))] = 0
                draft[string] /= draft[string].sum()
            for symbol, token in enumerate(order.tolist()):
                tokens[*string, symbol] = (*tokens[string], int(token))
    return LawSet(target, draft)


@dataclass(frozen=True, slots=True)
class Drafts:
    """All drafts of one shape that can be drawn, and the target's rows for each.

    Attributes:
        drafts: [D].
        chances: [D] of being drawn.
        logprobs: [D, nodes + 1, NUM_SYMBOLS] the target's.
    """

    drafts: Seq[Draft]
    chances: Numbers
    logprobs: Tensor


def drafts_of(laws: LawSet, shape: Shape, replacement: bool = True, chosen: bool = False) -> Drafts:
    """Every draft of a shape. chosen: its distributions are not told, as if a rule had chosen its tokens."""
    drafts, chances, logprobs = [], [], []
    for symbols in product(range(NUM_SYMBOLS), repeat=len(shape)):
        paths: list[tuple[int, ...]] = [()]
        chance = 1.0
        for node, parent in enumerate(shape):
            law = laws.draft[paths[parent + 1]]
            taken = [symbols[other] for other in range(node) if shape[other] == parent]
            if not replacement:
                law = law.copy()
                law[taken] = 0
                law = law / law.sum() if law.sum() > 0 else law
            chance *= float(law[symbols[node]])
            paths.append((*paths[parent + 1], symbols[node]))
        if chance == 0:
            continue
        probs = None if chosen else torch.from_numpy(np.stack([laws.draft[path] for path in paths]))
        drafts.append(Draft(list(symbols), list(shape), probs, replacement))
        chances.append(chance)
        logprobs.append(torch.from_numpy(np.stack([laws.target[path] for path in paths])).log())
    total = np.array(chances)
    return Drafts(drafts, total / total.sum(), torch.stack(logprobs))
