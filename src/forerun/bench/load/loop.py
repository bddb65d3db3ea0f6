"""Plain decoding and `auto` in a closed loop: requests of mixed lengths, a fixed number of them outstanding.

Both arms serve the same requests in the same order, on one loaded model, in turn. Which one begins changes from pair to
pair, so that what the machine does in between falls on both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.bench.load.asks import Ask, in_turn
from forerun.bench.load.serving import Clients, Window, closed_loop, quantile
from forerun.bench.measure import Interval, bootstrap, ratio, timed
from forerun.bench.report import Columns
from forerun.config import SamplingParams
from forerun.engine import LLM

PLAIN = "plain"
REQUESTS = 3
"""Requests that a window serves for each that is outstanding."""
LEAST_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class LoopRow:
    """One arm at one number of outstanding requests; medians and intervals over the pairs. Times in milliseconds.

    Attributes:
        outstanding: requests that are open at any time.
        method: PLAIN, or the drafter with K chosen automatically.
        speed: tokens per second, prompts included.
        over_plain: its ratio to plain decoding's in the same pair.
        first_token: median over all requests, waiting included.
        first_token_p90: its 90th percentile.
        between: median time between tokens; those that come together share the time.
        wait_p99: 99th percentile of the time between two arrivals, however many tokens come with each.
        over_generate: at one outstanding request, the gain over plain decoding beside that of LLM.generate on the same
            prompts in the same pair; None elsewhere.
    """

    outstanding: int
    method: str
    speed: Interval
    over_plain: Interval
    first_token: float
    first_token_p90: float
    between: float
    wait_p99: float
    over_generate: Interval | None = None


COLUMNS: Columns[LoopRow] = {
    "outstanding, method": lambda row: f"{row.outstanding}, {row.method}",
    "tokens/s": lambda row: f"{row.speed:.1f}",
    "over plain": lambda row: f"{row.over_plain:.3f}",
    "first token ms": lambda row: f"{row.first_token:.0f}",
    "p90": lambda row: f"{row.first_token_p90:.0f}",
    "between tokens ms": lambda row: f"{row.between:.1f}",
    "p99 between arrivals": lambda row: f"{row.wait_p99:.1f}",
    "gain over generate's": lambda row: "" if row.over_generate is None else f"{row.over_generate:.3f}",
}


def measure(
    arms: Mapping[str, LLM],
    asks: Sequence[Ask],
    params: SamplingParams,
    outstanding: Sequence[int],
    pairs: int,
    say: Callable[[str], None] = lambda _: None,
) -> list[LoopRow]:
    """A row for every number of outstanding requests and arm.

    Args:
        arms: engines over one loaded model; PLAIN must be one of them.
        params: of all requests but for their length.
        pairs: interleaved runs of all arms that count; one more warms up.
    """
    rows = []
    for number in outstanding:
        say(f"{number} outstanding: {pairs} pairs of {len(arms)} arms")
        count = max(REQUESTS * number, LEAST_REQUESTS)
        windows: dict[str, list[Window]] = {name: [] for name in arms}
        alone: dict[str, list[float]] = {name: [] for name in arms}
        for pair in range(-1, pairs):  # the first warms up
            part = in_turn(asks, max(pair, 0) * count, count)
            for name in list(arms)[:: 1 if pair % 2 else -1]:
                clients = Clients(arms[name].engine, params, f"{name} {number} {pair}")
                window = closed_loop(clients, part if pair >= 0 else part[: number + 1], number)
                if pair >= 0:
                    windows[name].append(window)
                    if number == 1:
                        alone[name].append(_generate_speed(arms[name], part, params))
        rows += [_row(number, name, windows, alone if number == 1 else None) for name in arms]
    return rows


def _row(
    outstanding: int, name: str, windows: Mapping[str, Sequence[Window]], alone: Mapping[str, Sequence[float]] | None
) -> LoopRow:
    speeds = {arm: [window.speed for window in each] for arm, each in windows.items()}
    over_generate = None
    if alone is not None and name != PLAIN:
        gains = [a / b for a, b in zip(speeds[name], speeds[PLAIN], strict=True)]
        over_generate = ratio(gains, [a / b for a, b in zip(alone[name], alone[PLAIN], strict=True)])
    streams = [stream for window in windows[name] for stream in window.streams]
    first = [1e3 * stream.first_token for stream in streams if stream.first_token is not None]
    return LoopRow(
        outstanding,
        name,
        speed=bootstrap(speeds[name]),
        over_plain=ratio(speeds[name], speeds[PLAIN]),
        first_token=statistics.median(first),
        first_token_p90=quantile(first, 0.9),
        between=1e3 * quantile([gap for stream in streams for gap in stream.gaps], 0.5),
        wait_p99=1e3 * quantile([wait for stream in streams for wait in stream.waits], 0.99),
        over_generate=over_generate,
    )


def _generate_speed(llm: LLM, asks: Sequence[Ask], params: SamplingParams) -> float:
    """Tokens per second of `LLM.generate`, one request after the other."""

    def run() -> int:
        count = 0
        for ask in asks:
            generation: Any = llm.generate(ask.token_ids, replace(params, max_tokens=ask.max_tokens))
            count += len(generation.token_ids)
        return count

    result = timed(run)
    return result.value / result.seconds
