"""One request as its client saw it: when what came, and how it ended."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from forerun.bench.serve.asks import Ask

_DONE = b"[DONE]"
_DRAFTED, _ACCEPTED, _FORWARDS = "num_draft_tokens", "num_accepted_draft_tokens", "num_forwards"


@dataclass(slots=True)
class Answered:
    """One request and its answer. Times are in seconds of one clock.

    Attributes:
        ask: what was asked.
        sent: when.
        ended: when the answer was complete, or the request had failed.
        arrivals: when pieces of the answer's text came.
        text: of the answer.
        num_tokens: of the answer, as the server counts; where it does not tell, pieces of text.
        is_counted: the server told.
        prompt_tokens: as the server counts; None where it does not tell.
        num_drafted, num_accepted, num_forwards: as the server tells; 0 where it does not.
        error: why there is no whole answer; None if there is one.
    """

    ask: Ask
    sent: float
    ended: float = math.nan
    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    num_tokens: int = 0
    is_counted: bool = False
    prompt_tokens: int | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    num_forwards: int = 0
    error: str | None = None

    @property
    def first_token(self) -> float | None:
        """Seconds from sending to the first piece of text; None where none came."""
        return self.arrivals[0] - self.sent if self.arrivals else None

    @property
    def seconds(self) -> float:
        """From sending to the end."""
        return self.ended - self.sent

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first; None where there is no second one."""
        if len(self.arrivals) < 2 or self.num_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_tokens - 1)

    @property
    def waits(self) -> list[float]:
        """Seconds between arrivals, however many tokens came with each."""
        return [now - before for before, now in pairwise(self.arrivals)]

    def read(self, events: Iterable[tuple[float, bytes]]) -> None:
        """Take what a stream of server-sent events held. events: (when it came, its data)."""
        for when, data in events:
            if data == _DONE:
                continue
            try:
                body = json.loads(data)
            except ValueError:
                body = None
            if not isinstance(body, dict):
                self.error = "an event is no JSON object"
                return
            if body.get("error"):
                self.error = error_of(body)
                return
            self._take(when, body)
        if not self.is_counted:
            self.num_tokens = len(self.arrivals)

    def _take(self, when: float, body: Mapping[str, Any]) -> None:
        piece = "".join(_texts(body))
        if piece:
            self.arrivals.append(when)
            self.text += piece
        usage = body.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            self.num_tokens, self.is_counted = usage["completion_tokens"], True
            self.prompt_tokens = usage.get("prompt_tokens")
        metrics = body.get("metrics")
        told = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
        if isinstance(told, dict):
            self.num_drafted, self.num_accepted, self.num_forwards = (
                int(told.get(name) or 0) for name in (_DRAFTED, _ACCEPTED, _FORWARDS)
            )


class EventReader:
    """Splits a stream of bytes into the data of its server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, piece: bytes) -> list[bytes]:
        """The data of the events that are complete."""
        held = self._rest + piece
        if b"\r" in held:
            held = held.replace(b"\r\n", b"\n")
        *whole, self._rest = held.split(b"\n\n")
        return [data for data in map(_data, whole) if data]


def error_of(body: object) -> str:
    """What an error body of OpenAI's says, in one line."""
    told = body.get("error", body.get("detail")) if isinstance(body, dict) else None
    message = told.get("message", told) if isinstance(told, dict) else told
    return " ".join(str(message).split())[:300] if message else "no reason is given"


def _data(event: bytes) -> bytes:
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


def _texts(body: Mapping[str, Any]) -> Iterator[str]:
    for choice in body.get("choices") or ():
        delta = choice.get("delta")
        held = delta if isinstance(delta, dict) else choice
        for name in ("text", "content", "reasoning_content"):
            if isinstance(held.get(name), str):
                yield held[name]
