"""A draft model some of whose sequences may only use a part of its vocabulary."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from weakref import WeakSet

import torch

from forerun.models import Forward, LanguageModel, Rows, StandIn
from forerun.types import Cache


class RestrictedModel(StandIn):
    """A model that gives some of its sequences no chance outside a set of tokens; otherwise the model itself.

    Attributes:
        restrict: whether the caches made from now on belong to such sequences.
    """

    def __init__(self, model: LanguageModel, allowed: Seq[int]) -> None:
        super().__init__(model)
        self._hidden = torch.ones(model.vocab_size, dtype=torch.bool, device=model.device)
        self._hidden[list(allowed)] = False
        self._restricted: WeakSet[Cache] = WeakSet()
        self.restrict = False

    def new_cache(self) -> Cache:
        cache = super().new_cache()
        if self.restrict:
            self._restricted.add(cache)
        return cache

    @torch.inference_mode()
    def forward(self, batch: Seq[Rows], layers: Seq[int] = ()) -> Forward:
        result = self.model.forward(batch, layers)
        at = 0
        for rows in batch:
            if rows.num_wanted and rows.cache in self._restricted:
                part = result.logits[at : at + rows.num_wanted]
                part.masked_fill_(self._hidden[: part.shape[1]], -torch.inf)
            at += rows.num_wanted
        return result
