"""Patterns of load: so many requests at once, or so many a second; and what a window of it gave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from forerun.bench.serve.answers import Answered
from forerun.bench.serve.arm import Arm, Send
from forerun.bench.serve.asks import Ask


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
class Window:
    """All of some requests, from the first that is sent to the last that ends.

    Attributes:
        seconds: that it took.
        cpu_seconds: of this process meanwhile.
        answers: in the order in which they were sent.
    """

    seconds: float
    cpu_seconds: float
    answers: Sequence[Answered]

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers if answer.error is None)

    @property
    def speed(self) -> float:
        """Tokens per second, of whole answers."""
        return self.num_tokens / self.seconds


async def run(arm: Arm, load: Load, asks: Sequence[Ask], seed: int) -> Window:
    """The requests as the load has them come. seed: of the moments of an open loop."""
    beside = asyncio.ensure_future(arm.beside()) if arm.beside is not None else None
    started, cpu = time.perf_counter(), time.process_time()
    try:
        if load.rate is not None:
            answers = await _open_loop(arm.send, asks, load.rate, seed)
        else:
            answers = await _closed_loop(arm.send, asks, load.concurrency or 1)
        return Window(time.perf_counter() - started, time.process_time() - cpu, answers)
    finally:
        if beside is not None:
            beside.cancel()
            with suppress(asyncio.CancelledError):
                await beside


async def _closed_loop(send: Send, asks: Sequence[Ask], concurrency: int) -> list[Answered]:
    waiting, answers = iter(enumerate(asks)), dict[int, Answered]()
    async with asyncio.TaskGroup() as clients:
        for _ in range(min(concurrency, len(asks))):
            clients.create_task(_client(send, waiting, answers))
    return [answers[place] for place in sorted(answers)]


async def _client(send: Send, waiting: Iterator[tuple[int, Ask]], answers: dict[int, Answered]) -> None:
    for place, ask in waiting:
        answers[place] = await send(ask)


async def _open_loop(send: Send, asks: Sequence[Ask], rate: float, seed: int) -> list[Answered]:
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(asks))
    started = asyncio.get_running_loop().time()
    moments = started + np.cumsum(gaps) - gaps[0]

    async def client(moment: float, ask: Ask) -> Answered:
        await asyncio.sleep(moment - asyncio.get_running_loop().time())
        return await send(ask)

    async with asyncio.TaskGroup() as clients:
        tasks = [clients.create_task(client(float(moment), ask)) for moment, ask in zip(moments, asks, strict=True)]
    return [task.result() for task in tasks]
