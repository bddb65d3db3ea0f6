"""Servers under load, in turn: every arm has the same requests in every round, and which one begins alternates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forerun.bench.load.asks import in_turn
from forerun.bench.serve.arm import Arm
from forerun.bench.serve.asks import Ask
from forerun.bench.serve.load import Load, Window, run
from forerun.errors import ConfigError

LEAST_REQUESTS = 8
WARMUP = 2
"""Requests of each client before anything is counted."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one load gave.

    Attributes:
        windows: by arm, one a round.
    """

    load: Load
    windows: Mapping[Arm, Sequence[Window]]


async def measure(
    arms: Sequence[Arm],
    loads: Sequence[Load],
    asks: Sequence[Ask],
    each: int,
    rounds: int,
    say: Callable[[str], None] = lambda _: None,
) -> list[Measured]:
    """Every load on every arm. A task that is cancelled meanwhile returns the rounds that are whole.

    Args:
        asks: the requests, from the beginning again after the last.
        each: requests of a window for every one that is open at once, LEAST_REQUESTS at least; all of them in an open
            loop.
        rounds: windows of each arm that count.

    Raises:
        ConfigError: an arm answers none of the requests that warm it up.
    """
    found: list[Measured] = []
    try:
        for load in loads:
            part = [arm for arm in arms if not arm.is_alone or load.concurrency == 1]
            windows: dict[Arm, list[Window]] = {arm: [] for arm in part}
            found.append(Measured(load, windows))
            await _rounds(load, windows, asks, each, rounds, say)
    except asyncio.CancelledError:  # Ctrl-C: what is whole stands
        say("interrupted")
    return [whole for whole in map(_whole, found) if any(whole.windows.values())]


async def _rounds(
    load: Load,
    windows: dict[Arm, list[Window]],
    asks: Sequence[Ask],
    each: int,
    rounds: int,
    say: Callable[[str], None],
) -> None:
    """One load on its arms, round after round."""
    count = each if load.rate is not None else max(each * (load.concurrency or 1), LEAST_REQUESTS)
    for number in range(-1, rounds):  # the first warms up
        here = in_turn(asks, max(number, 0) * count, count if number >= 0 else WARMUP * (load.concurrency or 1))
        for arm in list(windows)[:: 1 if number % 2 else -1]:
            window = await run(arm, load, here, seed=number + 1)
            if number < 0:
                _check(arm, window)
                continue
            windows[arm].append(window)
            failed = sum(answer.error is not None for answer in window.answers)
            say(
                f"{load.name}, round {number + 1} of {rounds}, {arm.name}: {window.speed:.1f} tokens/s"
                + (f", {failed} of {count} failed" if failed else "")
            )


def _whole(measured: Measured) -> Measured:
    """The rounds in which every arm took part."""
    rounds = min(map(len, measured.windows.values()), default=0)
    return Measured(measured.load, {arm: windows[:rounds] for arm, windows in measured.windows.items()})


def _check(arm: Arm, window: Window) -> None:
    errors = [answer.error for answer in window.answers]
    if all(errors):
        raise ConfigError(f"{arm.name} answers no request: {errors[0]}")
    if not any(answer.num_tokens for answer in window.answers):
        raise ConfigError(f"{arm.name} answers with no text. Is it an OpenAI-compatible server that streams?")
