"""The target's own laws: the distribution of the next token after some, each computed alone, and of short
continuations.

The reference of everything statistical. A law is computed by teacher forcing: a prompt in a cache, and the tokens after
it as one chain, which is dropped again. There is no draft, no tree, no batch and no rollback in it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.audit.statistics import Numbers
from forerun.config import SamplingParams
from forerun.models import LanguageModel, Rows
from forerun.sampling import LogitsPipeline, LogitsRow
from forerun.types import Sequence

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


class Continuations:
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
