"""The ranks of a group as one of them sees the others: bytes go from one to another, and nothing is added on the way.

Products that are summed over ranks are added by forerun itself, in rank order: the order in which a collective
reduction adds depends on the number of rows. So messages are sent and received, and no more is asked of the backend.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from forerun.config import RANK_TIMEOUT_VARIABLE
from forerun.errors import ConfigError, RankError
from forerun.ranks.process_state import Process, told

TIMEOUT = 15.0
"""Seconds without an answer after which a rank counts as lost, where no variable says otherwise."""
LOADING_TIMEOUT = 1800.0
"""Seconds that the ranks may take longer than each other to read their weights."""
LEADER = 0
_PARTS, _ORDERS = 1, 2
"""Tags, which tell messages of one kind from another."""


def rank_timeout() -> float:
    """Seconds without an answer after which a rank counts as lost.

    Raises:
        ConfigError: the variable holds no number of at least 1.
    """
    text = os.environ.get(RANK_TIMEOUT_VARIABLE, "")
    try:
        seconds = float(text) if text else TIMEOUT
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 86_400:
        raise ConfigError(
            f"{RANK_TIMEOUT_VARIABLE} is {text!r}, but must be seconds from 1 to 86400. Correct it or unset it."
        )
    return seconds


@dataclass(slots=True)
class Moved:
    """What has been gathered so far.

    Attributes:
        gathers: collectives in which a rank got parts of the others. seconds: that they took on this rank.
    """

    gathers: int = 0
    seconds: float = 0.0


class Peers:
    """This rank and the others.

    Attributes:
        rank: of this process, from 0. count: of all.
        moved: what has been gathered.
        processes: of each rank, where its process is known; see `told`.
        reason_of: gives what a rank has said before it ended, by its number.
        store: where ranks leave words for each other.
        lost: why the group can be used no more. when_lost: called once with that.

    Args:
        backend: sends and receives: a process group of torch.distributed.
        timeout: seconds without an answer after which a rank is lost.
    """

    def __init__(self, backend: Any, rank: int, count: int, timeout: float) -> None:
        self.rank, self.count = rank, count
        self.moved = Moved()
        self.processes: list[Process] = []
        self.reason_of: Callable[[int], str | None] = lambda rank: None
        self.store: Any = None
        self.lost: RankError | None = None
        self.when_lost: list[Callable[[RankError], None]] = []
        self._backend, self._timeout = backend, timeout
        self._lock = threading.Lock()

    @property
    def is_leader(self) -> bool:
        return self.rank == LEADER

    @contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Within it, a rank may be silent for so long."""
        before, self._timeout = self._timeout, max(seconds, self._timeout)
        try:
            yield
        finally:
            self._timeout = before

    def exchange(self, part: Tensor) -> list[Tensor]:
        """Every rank's part, in rank order, on every rank. part: contiguous, of one shape and type on all ranks.

        Raises:
            RankError: one of them is lost.
        """
        started = time.perf_counter()
        parts = [part if rank == self.rank else torch.empty_like(part) for rank in range(self.count)]
        others = [rank for rank in range(self.count) if rank != self.rank]
        self._move(parts, sends=[(part, rank) for rank in others], receives=others)
        self._account(started)
        return parts

    def to_leader(self, part: Tensor) -> list[Tensor] | None:
        """As `exchange`, but the leader alone gets the parts; the others get None."""
        started = time.perf_counter()
        parts = None
        if self.is_leader:
            others = range(1, self.count)
            parts = [part if rank == self.rank else torch.empty_like(part) for rank in range(self.count)]
            self._move(parts, sends=[], receives=others)
        else:
            self._move([], sends=[(part, LEADER)], receives=())
        self._account(started)
        return parts

    def agree(self, passed: bool) -> bool:
        """Whether something holds on every rank."""
        return all(bool(each) for each in self.exchange(torch.tensor([passed], dtype=torch.uint8)))

    def order(self, data: Tensor) -> None:
        """Of the leader: send bytes, [n] uint8, to all others."""
        with self._failing():
            works = [self._backend.send([data], rank, _ORDERS) for rank in range(1, self.count)]
            for work in works:
                self._wait(work)

    def receive(self, size: int) -> Tensor:
        """Of the others: so many bytes that the leader has sent, [size] uint8."""
        data = torch.empty(size, dtype=torch.uint8)
        with self._failing():
            self._wait(self._backend.recv([data], LEADER, _ORDERS))
        return data

    def break_off(self, reason: str, rank: int | None = None) -> RankError:
        """Use the group no more: what it was in the middle of was cut short. The error that says so from now on."""
        error = RankError(f"{reason} Load the model anew.", rank)
        return self._be_lost(error)

    def _move(self, parts: list[Tensor], sends: list[tuple[Tensor, int]], receives: Any) -> None:
        with self._failing():
            works = [self._backend.send([data], rank, _PARTS) for data, rank in sends]
            works += [self._backend.recv([parts[rank]], rank, _PARTS) for rank in receives]
            for work in reversed(works):  # what is received first
                self._wait(work)

    def _wait(self, work: Any) -> None:
        work.wait(timedelta(seconds=self._timeout))

    def _account(self, started: float) -> None:
        self.moved.gathers += 1
        self.moved.seconds += time.perf_counter() - started

    @contextmanager
    def _failing(self) -> Iterator[None]:
        if self.lost is not None:
            raise self.lost
        try:
            yield
        except RuntimeError as error:  # of torch.distributed: a connection that was closed, or the time was over
            who, what = told(self.rank, self.processes, self.reason_of, str(error), self._timeout)
            raise self._be_lost(RankError(f"{what} All ranks end. Start again.", who)) from None

    def _be_lost(self, error: RankError) -> RankError:
        with self._lock:
            if self.lost is not None:
                return self.lost
            self.lost = error
        for call in self.when_lost:
            call(error)
        return error
