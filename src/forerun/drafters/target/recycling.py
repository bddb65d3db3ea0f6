"""Token Recycling: tokens that the target gave a high probability before are proposed again.

Luo and others, "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling",
2408.08696. A matrix keeps, for every token, the k most probable successors that the target gave when it last computed
the token, in whatever context, rejected drafts included; a tree is read off it. The tree here is not fixed: which
ranks get a node follows from measured acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np

from forerun.drafters.base import Binding, OneByOne, Traits
from forerun.drafters.ranked_tree import Child, RankedTree, best_tree
from forerun.drafters.target.successors import STEADY, Matrix, Successors, load_matrix, save_matrix
from forerun.errors import ConfigError, DrafterError
from forerun.policy import Rates
from forerun.types import Draft, Needs, Sequence, Step

_DEPTHS = 3
"""Depths whose acceptance is measured apart; deeper nodes count as the last."""
_CHANCES = (0.4, 0.12, 0.07, 0.05, 0.04, 0.03, 0.02, 0.02)
"""Prior chance of each rank."""
_REFRESH = 16
"""Drafts after which the chances measured since are used."""


class Recycling(OneByOne):
    """Drafts a tree from the target's former predictions; no model, no training. Chosen, never drawn.

    Args:
        width: k, successors kept of every token (1..8).
        share: one matrix for all requests. It makes the first drafts of a request better, but how fast a request is
            served then tells something of the others' text; without it, every request fills a matrix of its own.
        matrix: a file that `save` has written, which every request's matrix begins with.
        learn_prompt: fill the matrix from the prompt too; its logits are then computed at every token.

    Raises:
        ConfigError: width is out of range.
    """

    def __init__(
        self,
        width: int = 8,
        share: bool = False,
        matrix: str | None = None,
        learn_prompt: bool = True,
    ) -> None:
        if not 1 <= width <= len(_CHANCES):
            raise ConfigError(
                f"width is {width}, but must lie in 1..{len(_CHANCES)}: successors beyond are too seldom "
                "accepted. Leave it out."
            )
        self._needs = Needs(top_tokens=width, prompt_rows=learn_prompt)
        self._width, self._share, self._path = width, share, matrix
        self._vocab_size = 0
        self._tokenizer: Any = None
        self._base: Matrix | None = None
        self._shared: Successors | None = None
        self._successors: dict[Sequence, Successors] = {}
        self._trees: dict[Sequence, tuple[Draft, RankedTree]] = {}
        chances = _CHANCES[:width]
        self._rates = Rates([chance for _ in range(STEADY * _DEPTHS) for chance in chances])
        self._order = self._ranked()
        self._num_learned = 0

    @property
    def needs(self) -> Needs:
        return self._needs

    @property
    def traits(self) -> Traits:
        options = f"width={self._width} share={self._share} learn_prompt={self._needs.prompt_rows}"
        return Traits((type(self).__name__, options))

    def bind(self, binding: Binding) -> None:
        """Raises DrafterError where the saved matrix cannot be read or was saved for another vocabulary."""
        self._vocab_size, self._tokenizer = binding.target.vocab_size, binding.tokenizer
        if self._path is not None:
            self._base = load_matrix(self._path, self._vocab_size, self._columns, self._tokenizer)
        self._shared = self._new() if self._share else None

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        every = [self._shared] if self._shared is not None else list(self._successors.values())
        return sum(each.nbytes for each in every) + (0 if self._base is None else self._base.nbytes)

    def save(self, path: str | Path) -> None:
        """Write the shared matrix, for `matrix` of a later drafter with this tokenizer.

        Raises:
            DrafterError: there is none, since share is False; or the file cannot be written.
        """
        if self._shared is None:
            raise DrafterError(
                "There is no matrix to save: share is False, so each request's own is gone with it. Set share=True."
            )
        save_matrix(path, self._shared.dense(), self._tokenizer)

    def start(self, sequence: Sequence) -> None:
        self._successors[sequence] = self._new() if self._shared is None else self._shared

    def stop(self, sequence: Sequence) -> None:
        self._successors.pop(sequence, None)
        self._trees.pop(sequence, None)

    def reset(self) -> None:
        if self._shared is not None:
            self._shared = self._new()

    def commit(self, steps: Seq[Step]) -> None:
        for step in steps:
            drafted = self._trees.pop(step.sequence, None)
            if drafted is not None and drafted[0] is step.draft and step.verdict is not None:
                drafted[1].observe(self._rates, step.verdict)
                self._num_learned += 1
            if step.top_tokens is not None:
                token_ids, top = _seen(step)
                self._successors[step.sequence].update(token_ids, top)
        if self._num_learned >= _REFRESH:
            self._num_learned = 0
            self._order = self._ranked()

    @property
    def _columns(self) -> int:
        """Successors of a token; the smallest vocabularies have fewer than were asked for."""
        return min(self._width, self._vocab_size)

    def _new(self) -> Successors:
        return Successors(self._vocab_size, self._columns, self._base)

    def _draft(self, sequence: Sequence, budget: int, price: float) -> Draft:
        successors, order = self._successors[sequence], self._order

        def children(token_id: int, depth: int) -> list[Child[int]]:
            tokens, steady = successors.of(token_id)
            ranked = order[steady * _DEPTHS + min(depth, _DEPTHS - 1)]
            return [
                Child(chance, tokens[rank], level, tokens[rank]) for chance, rank, level in ranked if rank < len(tokens)
            ]

        tree = best_tree(sequence.token_ids[-1], children, budget, sequence.room, price)
        draft = Draft(tree.token_ids, tree.parents)
        self._trees[sequence] = (draft, tree)
        return draft

    def _ranked(self) -> list[list[tuple[float, int, int]]]:
        """For each class of steadiness and depth: (chance, rank, level), the most probable first."""
        order = []
        for first in range(0, len(self._rates), self._width):
            levels = range(first, first + self._width)
            chances = [(self._rates.rate(level), level - first, level) for level in levels]
            order.append(sorted(chances, key=lambda each: -each[0]))
        return order


def _seen(step: Step) -> tuple[list[int], np.ndarray[Any, np.dtype[np.int64]]]:
    """The tokens of the step's rows and what may follow each, of equal tokens the row that counts comes last."""
    assert step.top_tokens is not None
    top = step.top_tokens.numpy()
    if step.draft is None or step.verdict is None:
        end = step.num_computed
        return step.sequence.token_ids[end - len(top) : end], top
    drafted = step.draft.ids
    n, path = len(drafted), step.verdict.path
    before = len(step.sequence.token_ids) - len(path) - 1  # tokens there were when this was drafted
    first = len(top) - n - 1
    token_ids = [*drafted[::-1], *step.sequence.token_ids[before - 1 - first : before], *(drafted[i] for i in path)]
    rows = [*range(first + n, first, -1), *range(first + 1), *(first + 1 + i for i in path)]
    return token_ids, top[rows]
