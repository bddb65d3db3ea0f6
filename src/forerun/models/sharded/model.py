"""The leader's model: what the engine and all drafters see of a model that several ranks compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.cache import SequenceCache
from forerun.errors import RankError
from forerun.models.base import Forward, Rows
from forerun.models.model import Model
from forerun.models.sharded.conductor import Conductor
from forerun.ranks.orders import Order
from forerun.ranks.peers import Moved

_ROWS_AT_ONCE = 1024
"""Rows of the output layer that are gathered together."""


class ShardedModel(Model):
    """A target of which this rank, the leader, has a part, and other ranks have the others. It alone decides: what is
    asked of it is computed by all of them.

    Attributes:
        conductor: what tells the others.
    """

    conductor: Conductor
    _end: Callable[[], object] = staticmethod(lambda: None)

    @property
    def moved(self) -> Moved:
        """What has been gathered so far."""
        return self.conductor.peers.moved

    def when_lost(self, call: Callable[[RankError], None]) -> None:
        """Have something called, in some thread, when a rank is lost."""
        self.conductor.peers.when_lost.append(call)

    def close(self) -> None:
        """End the other ranks. The model can compute no more."""
        self._end()

    @torch.inference_mode()
    def forward(self, batch: Sequence[Rows], layers: Sequence[int] = ()) -> Forward:
        """As `Model.forward`.

        Raises:
            RankError: a rank is lost.
        """
        order, states = described(batch)
        with self.conductor.ordering({"kind": "forward", **order}, states):
            return super().forward(batch, layers)

    @torch.inference_mode()
    def forward_first(self, batch: Sequence[Rows], num_layers: int) -> tuple[Tensor, Tensor]:
        """As `Model.forward_first`.

        Raises:
            RankError: a rank is lost.
        """
        order, states = described(batch)
        with self.conductor.ordering({"kind": "first", "num_layers": num_layers, **order}, states):
            return super().forward_first(batch, num_layers)

    @torch.inference_mode()
    def output_rows(self, token_ids: Tensor) -> Tensor:
        """As `Model.output_rows`, from all ranks.

        Raises:
            RankError: a rank is lost.
        """
        rows = []
        for ids in token_ids.cpu().split(_ROWS_AT_ONCE):  # type: ignore[no-untyped-call]
            with self.conductor.ordering({"kind": "rows"}, [ids]):
                self.conductor.send()
                rows.append(self.decoder.output_rows(ids))
        return torch.cat(rows) if rows else self.decoder.embedding_rows(token_ids)


def described(batch: Sequence[Rows]) -> tuple[Order, list[Tensor]]:
    """The rows of a forward in plain values, and their states from the first layers."""
    rows: list[dict[str, Any]] = []
    states: list[Tensor] = []
    for each in batch:
        if each.states is not None or each.is_block:
            raise ValueError("rows with states beside their tokens are of heads, which are not shared out among ranks")
        parents = each.parents
        assert isinstance(each.cache, SequenceCache)  # as this model makes them
        row: dict[str, Any] = {"cache": each.cache.number, "n": len(each.token_ids)}
        if parents is not None:
            row["parents"] = list(parents)
        if each.num_logits is not None:
            row["num_logits"] = each.num_logits
        if each.hidden is not None:
            row["first_layer"] = each.first_layer
            states.append(each.hidden)
        rows.append(row)
    return {"rows": rows}, states


def as_rows(order: Order, states: Sequence[Tensor], cache_of: Callable[[int], Any]) -> list[Rows]:
    """The rows that were described. Tokens, which the leader alone reads, are zeros."""
    found, rest = [], iter(states)
    for row in order["rows"]:
        resumed = "first_layer" in row
        found.append(
            Rows(
                cache_of(row["cache"]),
                [0] * row["n"],
                row.get("parents"),
                row.get("num_logits"),
                next(rest) if resumed else None,
                row.get("first_layer", 0),
                num_taps=0,
            )
        )
    return found
