"""A draft model some of whose sequences may only use a part of its vocabulary."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from forerun.cache import SequenceCache
from forerun.models import Model, Rows


class RestrictedModel:
    """A model that gives some of its sequences no chance outside a set of tokens; otherwise the model itself.

    Attributes:
        restrict: whether the caches made from now on belong to such sequences.
    """

    def __init__(self, model: Model, allowed: Seq[int]) -> None:
        self._model = model
        self._hidden = torch.ones(model.vocab_size, dtype=torch.bool)
        self._hidden[list(allowed)] = False
        self._restricted: set[int] = set()
        self.restrict = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def new_cache(self) -> SequenceCache:
        cache = self._model.new_cache()
        self._restricted.discard(id(cache))  # a freed cache may have had this id
        if self.restrict:
            self._restricted.add(id(cache))
        return cache

    @torch.inference_mode()
    def forward(self, batch: Seq[Rows]) -> Tensor:
        """As Model.forward."""
        logits = self._model.forward(batch)
        at = 0
        for rows in batch:
            count = len(rows.token_ids) if rows.num_logits is None else rows.num_logits
            if count and id(rows.cache) in self._restricted:
                logits[at : at + count].masked_fill_(self._hidden[: logits.shape[1]], -torch.inf)
            at += count
        return logits
