"""One way to have requests answered, such as a server with speculation, and the contract of its senders."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from forerun.bench.serve.answers import Answered
from forerun.bench.serve.asks import Ask

Send: TypeAlias = Callable[[Ask], Awaitable[Answered]]
"""Sends a request and returns when it has ended. What fails is told by `Answered.error`."""

DRIVER = "driver thread"
"""As a place: the engine's own thread in this process."""
GENERATE = "LLM.generate"
"""As a place: one call after the other in this process."""


@dataclass(frozen=True, slots=True)
class Arm:
    """What takes part in a measurement.

    Attributes:
        place: the server's name, DRIVER or GENERATE.
        mode: how it is asked: "" as it is.
        send: how.
        beside: what runs while a window lasts; None for nothing.
        is_alone: takes one request at a time, and so takes part in loads of one at a time only.
    """

    place: str
    mode: str
    send: Send
    beside: Callable[[], Awaitable[None]] | None = None
    is_alone: bool = False

    @property
    def name(self) -> str:
        return f"{self.place}, {self.mode}" if self.mode else self.place


PLAIN = "plain"
"""The mode without speculation."""
