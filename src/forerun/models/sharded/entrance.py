"""Where a forward begins: the leader reads the embeddings, and tells the others what is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from forerun.models.attention.base import Layout

Table = Callable[[Tensor], Tensor]
"""Rows of the table of embeddings: [n] int64 -> [n, hidden]."""


class Entrance(Protocol):
    """What a rank's decoder asks where rows enter it."""

    def embed(self, layout: Layout) -> Tensor:
        """What enters the first layer, [T, hidden]."""

    def begin(self) -> None:
        """Rows enter a later layer, with states that every rank has."""

    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        """As `Decoder.embedding_rows`; of the leader alone."""
