"""The distributions that an audit compares with: the target's own, of next tokens and of short continuations.

They are computed by teacher forcing: a prompt in a cache, and the tokens after it as one chain, which is dropped again;
without drafts, trees, batches and rollback. Drafts are drawn from distributions that are known and lie near them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence as Seq
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
"""Tokens after a path that get cells of their own; the others share one."""
LEAST_PROBABILITY = 0.01
"""A token less probable than this gets none."""
_CHUNK = 256


class TargetDistributions:
    """The target's distributions after one prompt.

    Args:
        prompt: token ids, at least one.
    """

    def __init__(self, target: LanguageModel, prompt: Seq[int]) -> None:
        self.target = target
        self.prompt = list(prompt)
        self._pipeline = LogitsPipeline(target.vocab_size, target.eos_token_ids)
        self._logits: dict[Path, Tensor] = {}
        self._cache = target.new_cache()
        with torch.inference_mode():
            for start in range(0, len(self.prompt) - 1, _CHUNK):
                chunk = self.prompt[start : min(start + _CHUNK, len(self.prompt) - 1)]
                target.forward([Rows(self._cache, chunk, num_logits=0)])
                self._cache.commit(range(len(chunk)))

    def logits(self, path: Path) -> Tensor:
        """Return the logits [V] after the prompt and a path, as the model gives them."""
        if path not in self._logits:
            with torch.inference_mode():
                rows = Rows(self._cache, [self.prompt[-1], *path], num_logits=1)
                self._logits[path] = self.target.forward([rows]).logits[0].clone()
                self._cache.drop()
        return self._logits[path]

    def probabilities(self, path: Path, params: SamplingParams) -> Numbers:
        """Return the [V] probabilities, float64, of the token after a path, under a request's options."""
        sequence = Sequence(0, [*self.prompt, *path], len(self.prompt), params)
        with torch.inference_mode():
            processed = self._pipeline.process(self.logits(path)[None], [LogitsRow(sequence)])[0]
        self._pipeline.stop(sequence)
        found: Numbers = processed.double().exp().cpu().numpy()
        found /= found.sum()
        return found

    def close(self) -> None:
        """Free the cache."""
        self._cache.free()


class ContinuationCells:
    """Cells that short continuations of a prompt fall into, with their exact probabilities.

    The cells are the leaves of a tree of tokens that is opened where it is most probable, and at each opened path one
    more for all tokens without a branch. The last cell is for what cannot be: an answer that ended early.

    Args:
        params: of the requests; answers have max_tokens tokens, or end with one of its stop tokens.
        num_opened: paths whose distribution is computed, at most.
        ended: returns whether no more are opened, after the first.

    Attributes:
        opened: path -> the distribution [V] of its next token.
        probabilities: [C] of the cells.
    """

    def __init__(
        self, distributions: TargetDistributions, params: SamplingParams, num_opened: int, ended: Callable[[], bool]
    ) -> None:
        self.params = params
        self.opened: dict[Path, Numbers] = {}
        self._cells: dict[tuple[Path, bool], int] = {}
        probabilities: list[float] = []

        def add_cell(path: Path, holds_others: bool, probability: float) -> None:
            self._cells[path, holds_others] = len(probabilities)
            probabilities.append(probability)

        leaves: list[tuple[float, Path]] = [(-1.0, ())]
        while leaves and len(self.opened) < num_opened and not (self.opened and ended()):
            negative, path = heapq.heappop(leaves)
            if len(path) == params.max_tokens or (path and path[-1] in params.stop_token_ids):
                add_cell(path, False, -negative)
                continue
            self.opened[path] = following = distributions.probabilities(path, params)
            children = [int(token) for token in np.argsort(-following, kind="stable")[:MOST_CHILDREN]]
            children = [token for token in children if following[token] >= LEAST_PROBABILITY]
            others = following.copy()
            others[children] = 0  # exactly nothing where the options leave no other token
            add_cell(path, True, -negative * float(others.sum()))
            for token in children:
                heapq.heappush(leaves, (negative * float(following[token]), (*path, token)))
        for negative, path in sorted(leaves, key=lambda leaf: leaf[1]):
            add_cell(path, False, -negative)
        self.probabilities = np.array([*probabilities, 0.0])

    def cell(self, token_ids: Seq[int]) -> int:
        """Return the index of the cell that an answer falls into."""
        path: Path = ()
        for token in token_ids:
            if path not in self.opened:
                break
            longer = (*path, token)
            if longer not in self.opened and (longer, False) not in self._cells:
                return self._cells[path, True]
            path = longer
        return self._cells.get((path, False), len(self.probabilities) - 1)

    def counts(self, answers: Seq[Seq[int]]) -> Numbers:
        """Count how many of the answers fall into each cell, [C]."""
        cells = [self.cell(answer) for answer in answers]
        return np.bincount(cells, minlength=len(self.probabilities)).astype(np.float64)


# Rejection is exact whatever the drafts are drawn from, as long as that distribution is given; so any one will do that
# overlaps with the target's and differs from it. Drawing these costs no model.

FLATTER = 0.6
"""The power to which probabilities are raised."""
SPREAD = 0.7
"""Standard deviation of what is added to their logarithms."""
SHARE_OF_OTHERS = 0.2
"""Of a distorted distribution, the part that comes from the unprocessed one after the prompt: of tokens, too, that the
target's options may exclude."""


def distorted(probabilities: Numbers, other: Numbers, rng: np.random.Generator) -> Numbers:
    """Return a distribution [V] near another one, with a share of a third. probabilities, other: [V]."""
    weights = np.zeros_like(probabilities)
    possible = probabilities > 0
    noise = rng.normal(0.0, SPREAD, int(possible.sum()))
    weights[possible] = np.exp(FLATTER * np.log(probabilities[possible]) + noise)
    near: Numbers = (1 - SHARE_OF_OTHERS) * weights / weights.sum() + SHARE_OF_OTHERS * other
    near /= near.sum()
    return near


class DrawnDrafts(Drafter):
    """A drafter that draws chains from distorted distributions of the continuations that cells are made of.

    Args:
        known: prompt -> the cells of its continuations.
        distributions: prompt -> the target's after it.
        seed: of the draws; never that of the engine's noise.
    """

    def __init__(
        self,
        known: Mapping[Path, ContinuationCells],
        distributions: Mapping[Path, TargetDistributions],
        seed: int,
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._tables: dict[Path, dict[Path, Tensor]] = {}
        for prompt, continuations in known.items():
            other = distributions[prompt].probabilities((), SamplingParams())
            self._tables[prompt] = {
                path: torch.from_numpy(distorted(following, other, self._rng)).float()
                for path, following in continuations.opened.items()
            }

    @property
    def traits(self) -> Traits:
        """Return traits without costs that would be stored."""
        return Traits(("DrawnDrafts",))

    def start(self, sequence: Sequence) -> None:
        """Do nothing: no state is kept of a sequence."""

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        """Draw a chain for each sequence."""
        pairs = zip(sequences, num_draft_tokens, strict=True)
        return [self._draft(sequence, min(count, sequence.room)) for sequence, count in pairs]

    def commit(self, steps: Seq[Step]) -> None:
        """Do nothing: the drafter does not learn."""

    def stop(self, sequence: Sequence) -> None:
        """Do nothing: no state is kept of a sequence."""

    def _draft(self, sequence: Sequence, count: int) -> Draft:
        table = self._tables.get(tuple(sequence.token_ids[: sequence.num_prompt]))
        if table is None or count <= 0:
            return Draft.empty()
        path = tuple(sequence.output_ids)
        tokens: list[int] = []
        rows: list[Tensor] = []
        for _ in range(count):
            known = (*path, *tokens)
            while known not in table:
                known = known[:-1]
            rows.append(table[known])
            uniform = torch.rand(1, dtype=torch.float64, generator=self._generator)
            tokens.append(int(draw_tokens(rows[-1][None], uniform)))
        return Draft.chain(tokens, torch.stack([*rows, rows[-1]]))


# A symbol is one of the three most probable tokens at its position, or all others together. Three of them after a
# prompt have 64 cells, whose probabilities are exact; and an acceptance rule can be tried on them a million times,
# without a model.

NUM_SYMBOLS = 4
LENGTH = 3
"""Symbols that a step of these drafts writes at most: two accepted, and one more."""

Contexts = Mapping[tuple[int, ...], Numbers]
"""Symbols so far -> [NUM_SYMBOLS] the distribution of the next."""
Shape = tuple[int, ...]
"""Parents of a draft's nodes."""

CHAIN: Shape = (-1, 0)
TREE: Shape = (-1, -1, 0, 0)


@dataclass(frozen=True, slots=True)
class SymbolDistributions:
    """The target's distributions after one prompt, and those that drafts are drawn from, over symbols.

    Attributes:
        target, draft: of every string of fewer than LENGTH symbols.
    """

    target: Contexts
    draft: Contexts

    def probability(self, string: Seq[int]) -> float:
        """Return the target's probability of a string of at most LENGTH symbols."""
        return prod(float(self.target[tuple(string[:depth])][symbol]) for depth, symbol in enumerate(string))

    @property
    def cells(self) -> Numbers:
        """Return the probability of every string of LENGTH symbols, [NUM_SYMBOLS ** LENGTH] in lexicographic order."""
        return np.array([self.probability(string) for string in product(range(NUM_SYMBOLS), repeat=LENGTH)])


def symbol_distributions(
    distributions: TargetDistributions, params: SamplingParams, rng: np.random.Generator
) -> SymbolDistributions:
    """Reduce the distributions after a prompt, under a request's options, to symbols."""
    target: dict[tuple[int, ...], Numbers] = {}
    draft: dict[tuple[int, ...], Numbers] = {}
    tokens: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    for depth in range(LENGTH):
        for string in product(range(NUM_SYMBOLS), repeat=depth):
            following = distributions.probabilities(tokens[string], params)
            unprocessed = distributions.probabilities(tokens[string], SamplingParams())
            order = np.argsort(-unprocessed, kind="stable")[:NUM_SYMBOLS]
            others = following.copy()
            others[order[:-1]] = 0
            reduced = np.array([*following[order[:-1]], others.sum()])
            target[string] = reduced / reduced.sum()
            draft[string] = distorted(target[string], np.full(NUM_SYMBOLS, 1 / NUM_SYMBOLS), rng)
            if rng.random() < 0.25:  # what a draft's filter drops
                draft[string][int(np.argmin(draft[string]))] = 0
                draft[string] /= draft[string].sum()
            for symbol, token in enumerate(order.tolist()):
                tokens[*string, symbol] = (*tokens[string], int(token))
    return SymbolDistributions(target, draft)


@dataclass(frozen=True, slots=True)
class PossibleDrafts:
    """All drafts of one shape that can be drawn, and the target's rows for each.

    Attributes:
        drafts: [D].
        probabilities: [D] of being drawn.
        logprobs: [D, nodes + 1, NUM_SYMBOLS] the target's.
    """

    drafts: Seq[Draft]
    probabilities: Numbers
    logprobs: Tensor


def possible_drafts(
    distributions: SymbolDistributions, shape: Shape, replacement: bool = True, chosen: bool = False
) -> PossibleDrafts:
    """Return every draft of a shape. chosen: they carry no distributions, as if a rule had chosen their tokens."""
    drafts = []
    probabilities = []
    logprobs = []
    for symbols in product(range(NUM_SYMBOLS), repeat=len(shape)):
        paths: list[tuple[int, ...]] = [()]
        probability = 1.0
        for node, parent in enumerate(shape):
            row = distributions.draft[paths[parent + 1]]
            if not replacement:
                row = row.copy()
                row[[symbols[other] for other in range(node) if shape[other] == parent]] = 0
                row = row / row.sum() if row.sum() > 0 else row
            probability *= float(row[symbols[node]])
            paths.append((*paths[parent + 1], symbols[node]))
        if probability == 0:
            continue
        probs = None if chosen else torch.from_numpy(np.stack([distributions.draft[path] for path in paths]))
        drafts.append(Draft(list(symbols), list(shape), probs, replacement))
        probabilities.append(probability)
        logprobs.append(torch.from_numpy(np.stack([distributions.target[path] for path in paths])).log())
    total = np.array(probabilities)
    return PossibleDrafts(drafts, total / total.sum(), torch.stack(logprobs))
