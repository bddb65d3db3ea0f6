"""A hostile body beside a stream: how long the stream stands still, and how long a newcomer waits.

The server runs in this process (`serving.serving`), so that its steps can be watched.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from serving import JSON, LIMIT, Served

COMPLETIONS = "/v1/completions"
STREAM = {"prompt": "def f(x):\n", "max_tokens": 1900, "ignore_eos": True, "stream": True, "seed": 1}
"""Of the client beside the attack."""
NEWCOMER = STREAM | {"prompt": "class Stack:\n", "max_tokens": 8}
_BEFORE = 20
"""Pieces that the stream has had when the attack begins."""


@dataclass
class Seen:
    """What the client beside an attack saw.

    Attributes:
        pieces: time of each piece of its streams, a list for each stream.
        steps: (begin, end, whether it computed rows of prompts) of the engine's steps.
        begin, end: of the attack.
        status: the attack's answer; None if it was left before.
        first: seconds that a newcomer waited for its first piece; None without one.
    """

    pieces: list[list[float]] = field(default_factory=list)
    steps: list[tuple[float, float, bool]] = field(default_factory=list)
    begin: float = 0.0
    end: float = 0.0
    status: int | None = None
    first: float | None = None

    @property
    def gap(self) -> float:
        """The most seconds between two pieces during the attack, steps with prompts left out."""
        return max(
            self._without_prompts(*pair) for stream in self.pieces for pair in pairwise(stream) if self._in(*pair)
        )

    @property
    def step(self) -> float:
        """The most seconds of a step without prompts during the attack."""
        return max((b - a for a, b, prompts in self.steps if not prompts and self._in(a, b)), default=0.0)

    def _in(self, begin: float, end: float) -> bool:
        return begin < self.end and end > self.begin

    def _without_prompts(self, begin: float, end: float) -> float:
        inside = (min(b, end) - max(a, begin) for a, b, prompts in self.steps if prompts)
        return end - begin - sum(seconds for seconds in inside if seconds > 0)


def first_piece(url: str, body: dict[str, Any] | None = None) -> float:
    """Seconds until a client's first piece comes."""
    begin = time.perf_counter()
    with httpx.stream("POST", url + COMPLETIONS, json=body or NEWCOMER, timeout=LIMIT) as response:
        assert response.status_code == 200
        next(response.iter_raw())
    return time.perf_counter() - begin


def beside(
    served: Served,
    attack: dict[str, Any] | None,
    path: str = COMPLETIONS,
    *,
    seconds: float = LIMIT,
    newcomer: float | None = None,
) -> Seen:
    """Send a body while a client's stream runs, and see how the stream fares until the body is answered.

    Args:
        attack: the body; None: nothing is sent for `seconds`.
        seconds: after which the attack is left unanswered.
        newcomer: seconds after the attack's begin at which another client asks for its first piece; the attack is left
            when it has come.
    """
    seen, content, over = Seen(), json.dumps(attack).encode(), threading.Event()
    with _steps(served, seen), httpx.Client(base_url=served.url, timeout=httpx.Timeout(LIMIT, read=seconds)) as http:
        reader = threading.Thread(target=_read, args=(served.url, seen, over), daemon=True)
        reader.start()
        try:
            while not seen.pieces or len(seen.pieces[0]) < _BEFORE:
                assert reader.is_alive()
                time.sleep(0.01)
            seen.begin = time.perf_counter()
            sender = threading.Thread(target=_send, args=(http, path, content, seen, over), daemon=True)
            if attack is not None:
                sender.start()
            if newcomer is not None:
                time.sleep(newcomer)
                seen.first = first_piece(served.url)
            elif attack is None:
                time.sleep(seconds)
            else:
                sender.join(seconds)
            seen.end = time.perf_counter()
        finally:
            over.set()
            reader.join(LIMIT)
    return seen


def _read(url: str, seen: Seen, over: threading.Event) -> None:
    """Read one stream after another, and note when each piece comes."""
    while not over.is_set():
        pieces: list[float] = []
        seen.pieces.append(pieces)
        with httpx.stream("POST", url + COMPLETIONS, json=STREAM, timeout=LIMIT) as response:
            assert response.status_code == 200
            for _ in response.iter_raw():
                pieces.append(time.perf_counter())
                if over.is_set():
                    break


def _send(http: httpx.Client, path: str, content: bytes, seen: Seen, over: threading.Event) -> None:
    """Send the attack; leave it where its answer takes too long, or when the watching is over."""
    try:
        with http.stream("POST", path, content=content, headers=JSON) as response:
            seen.status = response.status_code
            for _ in response.iter_raw():
                if over.is_set():
                    break
    except httpx.HTTPError:
        pass


@contextmanager
def _steps(served: Served, seen: Seen) -> Iterator[None]:
    """Note the engine's steps."""
    engine = served.llm.engine
    advance = engine.advance

    def timed() -> None:
        begin = time.perf_counter()
        advance()
        seen.steps.append((begin, time.perf_counter(), engine.last_step.num_prompt_rows > 0))

    engine.advance = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.advance  # type: ignore[method-assign]
