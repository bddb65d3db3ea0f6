"""How drafts grow: how the nodes of a draft are chosen, whatever model gives their probabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence as Seq
from copy import copy
from typing import Any, Self

import torch

from forerun.drafters.models.base import DraftingModel
from forerun.types import Draft, Sequence


class Growth(ABC):
    """How the nodes of drafts are chosen.

    Args:
        model: that drafts; whatever its states are.
    """

    continues = False
    """Its drafts may begin with tokens that it is given (`ChainGrowth.begin_with`)."""

    def __init__(self, model: DraftingModel[Any]) -> None:
        self._model = model
        self._generator = torch.Generator()

    @property
    def options(self) -> tuple[str, ...]:
        """Return what changes the time of a draft, for `Traits.cost_key`."""
        return ()

    def with_model(self, model: DraftingModel[Any]) -> Self:
        """Return the same growth, with what it has measured, for a copy of the model."""
        made = copy(self)
        made._model = model
        return made

    def seed(self, seed: int | None) -> None:
        """Seed its draws; None: differently every time."""
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def begin_with(self, paths: Mapping[Sequence, Draft]) -> None:  # noqa: B027 - for those that continue
        """See, before `draft`, the chains with which the next drafts begin, as `Drafter.begin_with` does."""

    @abstractmethod
    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        """Return one draft for each sequence, as `Drafter.draft` does."""
