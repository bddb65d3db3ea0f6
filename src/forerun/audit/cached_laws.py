"""Laws of the user's model over a handful of symbols, kept in tables, and drafts drawn from laws near them.

A symbol is one of the three most probable tokens at its place, or all others together. After a prompt, three tokens
have 64 cells, whose probabilities are exact; and an acceptance rule can be tried on them a million times, since no
model is asked any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
import torch
from torch import Tensor

from forerun.audit.drawn_drafts import distorted
from forerun.audit.laws import Laws
from forerun.audit.statistics import Numbers
from forerun.config import SamplingParams
from forerun.types import Draft

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
