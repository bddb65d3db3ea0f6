"""The leader's side: what it does to caches and what it computes goes to the other ranks, in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor

from forerun.cache import PagePool
from forerun.errors import RankError
from forerun.models.attention.base import Layout
from forerun.models.sharded.entrance import Table
from forerun.ranks.orders import Order, send
from forerun.ranks.peers import Peers

HEARTBEAT = 2.0
"""Seconds of silence after which the leader says that it is still there."""


class Conductor:
    """Tells the other ranks what to do. They do to their caches what was done to the leader's, in the same order, and
    compute the same rows.

    An order leaves when the rows have been laid out here: one that fails before never leaves. Between the order and the
    end of the forward nothing may fail on one rank alone: if it does, the group is used no more.

    Args:
        pool: of the leader's caches.
    """

    def __init__(self, peers: Peers, pool: PagePool) -> None:
        self.peers = peers
        self._pool = pool
        self._log: list[list[Any]] = []
        self._pending: tuple[Order, Sequence[Tensor], int] | None = None  # and how much of the log was before it
        self._lock = threading.RLock()
        self._last, self._closed = time.monotonic(), threading.Event()

    def start(self) -> None:
        """From now on caches are watched, and the others are told that this rank is there."""
        self._log.clear()
        self._pool.observer = self._observe
        threading.Thread(target=self._beat, name="forerun-heartbeat", daemon=True).start()

    def _observe(self, cache: int, operation: str, *arguments: object) -> None:
        self._log.append([cache, operation, *(_plain(each) for each in arguments)])

    @contextmanager
    def ordering(self, order: Order, tensors: Sequence[Tensor] = ()) -> Iterator[None]:
        """Within it, something is computed for which the others get this order (`send`).

        Raises:
            RankError: a rank is lost, now or before.
        """
        with self._lock:
            if self.peers.lost is not None:
                raise self.peers.lost
            pages = [self._pool.num_taken, self._pool.num_published]
            self._pending = {**order, "pages": pages}, tensors, len(self._log)
            try:
                yield
            except BaseException as error:
                self._failed(error)
                raise
            finally:
                self._pending = None

    def _failed(self, error: BaseException) -> None:
        if self._pending is None and not isinstance(error, RankError):
            self.peers.break_off(f"What the ranks were computing was cut short ({type(error).__name__}).")

    def send(self, states: Tensor | None = None) -> None:
        """Send the order that is pending, if there is one, and the states that enter the first layer."""
        if self._pending is None:
            if states is not None:
                send(self.peers, {"kind": "states"}, [states])
            return
        order, tensors, mark = self._pending
        self._pending = None
        if states is not None:
            order, tensors = {**order, "enters": True}, [states, *tensors]
        self._send(order, tensors, mark)

    def close(self) -> None:
        """Let the others end."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._pool.observer = None
        with self._lock:
            if self.peers.lost is None:
                with suppress(RankError):
                    send(self.peers, {"kind": "close"})

    def _send(self, order: Order, tensors: Sequence[Tensor], mark: int) -> None:
        # rows that were fed since are fed again where they are laid out; caches that were forgotten meanwhile are not
        before, since = self._log[:mark], [entry for entry in self._log[mark:] if entry[1] == "forget"]
        self._log.clear()
        send(self.peers, {**order, "before": before, "since": since}, tensors)
        self._last = time.monotonic()

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT / 2):
            if time.monotonic() - self._last < HEARTBEAT or not self._lock.acquire(blocking=False):
                continue
            try:
                send(self.peers, {"kind": "beat"})
                self._last = time.monotonic()
            except RankError:
                return
            finally:
                self._lock.release()


class LeaderEntrance:
    """`Entrance` of the leader.

    Args:
        table: of all tokens.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self.conductor: Conductor | None = None

    def embed(self, layout: Layout) -> Tensor:
        """As `Entrance.embed`."""
        states = self._table(layout.token_ids)
        assert self.conductor is not None
        self.conductor.send(states)
        return states

    def begin(self) -> None:
        """As `Entrance.begin`."""
        assert self.conductor is not None
        self.conductor.send()

    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        """As `Entrance.embedding_rows`."""
        return self._table(token_ids).float()


def _plain(value: object) -> object:
    return list(value) if isinstance(value, (range, tuple)) else value
