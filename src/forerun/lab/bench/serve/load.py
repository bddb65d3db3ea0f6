"""Servers under load, in turn: so many requests at once, or so many a second; and what a window of it gave.

Every arm has the same requests in every round, and which one begins alternates.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from forerun.errors import ConfigError
from forerun.lab.bench.serve.requests import LoadRequest, TimedRequest

Send: TypeAlias = Callable[[LoadRequest], Awaitable[TimedRequest]]
"""Sends a request and returns when it has ended. Failures are in `TimedRequest.error`."""
DRIVER = "driver thread"
"""The name of the engine's own thread in this process, where others have a server's name."""
PLAIN = "plain"
"""The mode without speculation."""
LEAST_REQUESTS = 8
WARMUP = 2
"""Requests of each client before anything is counted."""


@dataclass(frozen=True, slots=True)
class ServingArm:
    """One way to have requests answered.

    Attributes:
        server: the server's name, or DRIVER.
        mode: PLAIN, or "" for the server's default.
        send: sends a request.
    """

    server: str
    mode: str
    send: Send

    @property
    def name(self) -> str:
        return f"{self.server}, {self.mode}" if self.mode else self.server


@dataclass(frozen=True, slots=True)
class Load:
    """How requests come: one of the two is given.

    Attributes:
        concurrency: as soon as one has ended the next is sent, so that so many are open (a closed loop).
        rate: so many a second are sent, at random moments of a Poisson process, whether others have ended or not.
    """

    concurrency: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g} a second"


@dataclass(frozen=True, slots=True)
class LoadWindow:
    """All of some requests, from the first that is sent to the last that ends.

    Attributes:
        seconds: that it took.
        cpu_seconds: of this process meanwhile.
        answers: in the order in which they were sent.
    """

    seconds: float
    cpu_seconds: float
    answers: Sequence[TimedRequest]

    @property
    def speed(self) -> float:
        """Return the tokens per second of complete answers."""
        return sum(answer.num_tokens for answer in self.answers if answer.error is None) / self.seconds


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """What one load gave.

    Attributes:
        windows: by arm, one a round.
    """

    load: Load
    windows: Mapping[ServingArm, Sequence[LoadWindow]]


async def measure_loads(
    arms: Sequence[ServingArm],
    loads: Sequence[Load],
    requests: Sequence[LoadRequest],
    each: int,
    rounds: int,
    say: Callable[[str], None] = lambda _: None,
) -> list[MeasuredLoad]:
    """Apply every load to every arm. A task that is cancelled meanwhile returns the rounds that are complete.

    Args:
        requests: the requests, from the beginning again after the last.
        each: requests of a window for every one that is open at once, LEAST_REQUESTS at least; all of them in an open
            loop.
        rounds: windows of each arm that count.

    Raises:
        ConfigError: an arm answers none of the requests that warm it up.
    """
    found: list[tuple[Load, dict[ServingArm, list[LoadWindow]]]] = []
    try:
        for load in loads:
            found.append((load, {arm: [] for arm in arms}))
            await _rounds(load, found[-1][1], requests, each, rounds, say)
    except asyncio.CancelledError:  # Ctrl-C: what is whole stands
        say("interrupted")
    whole = [(load, windows, min(map(len, windows.values()))) for load, windows in found]
    return [
        MeasuredLoad(load, {arm: made[:count] for arm, made in windows.items()})
        for load, windows, count in whole
        if count
    ]


async def _rounds(
    load: Load,
    windows: dict[ServingArm, list[LoadWindow]],
    requests: Sequence[LoadRequest],
    each: int,
    rounds: int,
    say: Callable[[str], None],
) -> None:
    """Apply one load to its arms, round after round."""
    count = each if load.rate is not None else max(each * (load.concurrency or 1), LEAST_REQUESTS)
    for number in range(-1, rounds):  # the first warms up
        size = count if number >= 0 else WARMUP * (load.concurrency or 1)
        here = [requests[(max(number, 0) * count + i) % len(requests)] for i in range(size)]
        for arm in list(windows)[:: 1 if number % 2 else -1]:
            window = await run_window(arm, load, here, seed=number + 1)
            if number < 0:
                _check(arm, window)
                continue
            windows[arm].append(window)
            failed = sum(answer.error is not None for answer in window.answers)
            say(
                f"{load.name}, round {number + 1} of {rounds}, {arm.name}: {window.speed:.1f} tokens/s"
                + (f", {failed} of {count} failed" if failed else "")
            )


def _check(arm: ServingArm, window: LoadWindow) -> None:
    errors = [answer.error for answer in window.answers]
    if all(errors):
        raise ConfigError(f"{arm.name} answers no request: {errors[0]}")
    if not any(answer.num_tokens for answer in window.answers):
        raise ConfigError(f"{arm.name} answers with no text. Is it an OpenAI-compatible server that streams?")


async def run_window(arm: ServingArm, load: Load, requests: Sequence[LoadRequest], seed: int) -> LoadWindow:
    """Send the requests as the load defines. seed: of the send times of an open loop."""
    started = time.perf_counter()
    cpu = time.process_time()
    if load.rate is not None:
        answers = await _open_loop(arm.send, requests, load.rate, seed)
    else:
        answers = await _closed_loop(arm.send, requests, load.concurrency or 1)
    return LoadWindow(time.perf_counter() - started, time.process_time() - cpu, answers)


async def _closed_loop(send: Send, requests: Sequence[LoadRequest], concurrency: int) -> list[TimedRequest]:
    waiting = iter(enumerate(requests))
    answers = dict[int, TimedRequest]()
    async with asyncio.TaskGroup() as clients:
        for _ in range(min(concurrency, len(requests))):
            clients.create_task(_client(send, waiting, answers))
    return [answers[number] for number in sorted(answers)]


async def _client(send: Send, waiting: Iterator[tuple[int, LoadRequest]], answers: dict[int, TimedRequest]) -> None:
    for number, request in waiting:
        answers[number] = await send(request)


async def _open_loop(send: Send, requests: Sequence[LoadRequest], rate: float, seed: int) -> list[TimedRequest]:
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(requests))
    started = asyncio.get_running_loop().time()
    moments = started + np.cumsum(gaps) - gaps[0]

    async def client(moment: float, request: LoadRequest) -> TimedRequest:
        await asyncio.sleep(moment - asyncio.get_running_loop().time())
        return await send(request)

    async with asyncio.TaskGroup() as clients:
        tasks = [
            clients.create_task(client(float(moment), request))
            for moment, request in zip(moments, requests, strict=True)
        ]
    return [task.result() for task in tasks]
