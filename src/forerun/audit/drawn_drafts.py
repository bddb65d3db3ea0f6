"""Drafts drawn from laws that are known, for targets whose drafter draws nothing: from the target's own, distorted.

Rejection is exact whatever the drafts are drawn from, as long as that is told; so any law will do that overlaps with
the target's and differs from it. What is drawn here costs no model.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from forerun.audit.laws import Continuations, Laws, Path
from forerun.audit.statistics import Numbers
from forerun.config import SamplingParams
from forerun.drafters import Drafter, Traits
from forerun.sampling import draw_tokens
from forerun.types import Draft, Sequence, Step

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
        known: dict[Path, Continuations],
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

    def draft(self, sequences: Seq[Sequence], budgets: Seq[int], price: float = 0.0) -> list[Draft]:
        """A chain for each."""
        return [self._draft(one, min(most, one.room)) for one, most in zip(sequences, budgets, strict=True)]

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
