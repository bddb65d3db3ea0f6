"""The other ranks' side: they do what the leader says until it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.cache import PagePool, SequenceCache
from forerun.errors import RankError
from forerun.models.attention.base import Layout
from forerun.models.model import Model
from forerun.models.sharded.model import as_rows
from forerun.ranks.orders import Order, receive
from forerun.ranks.peers import LEADER, Peers


class FollowerEntrance:
    """`Entrance` of a rank that is told what to compute: states come from the leader."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._states: Tensor | None = None

    def embed(self, layout: Layout) -> Tensor:
        """As `Entrance.embed`."""
        states, self._states = self._states, None
        if states is None:  # the self-test, which every rank runs by itself
            _, (states,) = receive(self._peers)
        return states

    def begin(self) -> None:
        """As `Entrance.begin`: the order was received before."""

    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        """As `Entrance.embedding_rows`."""
        raise RankError("Only rank 0 has the embeddings: a bug of forerun's.")

    def expect(self, states: Tensor) -> None:
        """What the next forward begins with."""
        self._states = states


class Follower:
    """Does to its caches what the leader did to its own, and computes the same rows.

    Args:
        model: of this rank's part.
    """

    def __init__(self, model: Model, entrance: FollowerEntrance, peers: Peers) -> None:
        self._model, self._entrance, self._peers = model, entrance, peers
        self._caches: dict[int, SequenceCache] = {}

    @torch.inference_mode()
    def run(self) -> None:
        """Until the leader closes the group.

        Raises:
            RankError: another rank is lost, or what the leader says does not fit to what was done here.
        """
        while True:
            order, tensors = receive(self._peers)
            if order["kind"] == "close":
                return
            if order["kind"] != "beat":
                self._follow(order, tensors)

    def _follow(self, order: Order, tensors: list[Tensor]) -> None:
        self._do_all(order["before"])
        pool = self._model.pool
        if [pool.num_taken, pool.num_published] != order["pages"]:
            raise RankError(
                f"Rank {self._peers.rank} has taken and published {pool.num_taken} and {pool.num_published} pages, but "
                f"rank {LEADER} {order['pages']}: a bug of forerun's."
            )
        self._do_all(order["since"])
        if order["kind"] == "rows":
            self._model.decoder.output_rows(tensors[0])
            return
        if order.get("enters"):
            self._entrance.expect(tensors.pop(0))
        rows = as_rows(order, tensors, self._caches.__getitem__)
        if order["kind"] == "first":
            self._model.forward_first(rows, order["num_layers"])
        else:
            self._model.forward(rows)

    def _do_all(self, operations: Sequence[Sequence[Any]]) -> None:
        for cache, operation, *arguments in operations:
            self._do(cache, operation, arguments)

    def _do(self, number: int, operation: str, arguments: Sequence[Any]) -> None:
        if number < 0:
            _OF_POOL[operation](self._model.pool, *arguments)
        elif operation == "new_cache":
            cache = self._model.new_cache()
            if cache.number != number:
                raise RankError(f"Rank {self._peers.rank} counts other caches than rank {LEADER}: a bug of forerun's.")
            self._caches[number] = cache
        elif operation == "forget":
            forgotten = self._caches.pop(number, None)  # None: one of the self-test's
            if forgotten is not None:
                forgotten.free()
        elif operation == "fork":
            self._caches[number].fork(self._caches[arguments[0]], arguments[1])
        else:
            _OF_CACHE[operation](self._caches[number], *arguments)


_OF_POOL: Mapping[str, Callable[..., object]] = {"limit": PagePool.limit, "recount": PagePool.recount}
_OF_CACHE: Mapping[str, Callable[..., object]] = {
    "feed": SequenceCache.feed,
    "commit": SequenceCache.commit,
    "drop": SequenceCache.drop,
    "truncate": SequenceCache.truncate,
    "free": SequenceCache.free,
    "adopt": SequenceCache.adopt,
    "publish": SequenceCache.publish,
}
