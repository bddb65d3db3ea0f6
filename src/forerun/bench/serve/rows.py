"""From windows of load to a row for each arm: speeds, their ratios, times, goodput."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forerun.bench.load.serving import quantile
from forerun.bench.measure import Interval, bootstrap, ratio
from forerun.bench.report import Columns, decimal, percent
from forerun.bench.serve.answers import Answered
from forerun.bench.serve.arm import DRIVER, GENERATE, PLAIN, Arm
from forerun.bench.serve.load import Load, Window
from forerun.bench.serve.measure import Measured


@dataclass(frozen=True, slots=True)
class Goal:
    """What a request must keep to count as good; None for no limit. Seconds.

    Attributes:
        first_token: to the first token.
        per_token: per token after it.
        whole: from sending to the end.
    """

    first_token: float | None = None
    per_token: float | None = None
    whole: float | None = None

    @property
    def is_set(self) -> bool:
        return (self.first_token, self.per_token, self.whole) != (None, None, None)

    def is_kept(self, answer: Answered) -> bool:
        """Whether a whole answer came in these times."""
        pairs = (
            (self.first_token, answer.first_token),
            (self.per_token, answer.per_token),
            (self.whole, answer.seconds),
        )
        if answer.error is not None:
            return False
        return all(limit is None or time is None or time <= limit for limit, time in pairs)


@dataclass(frozen=True, slots=True)
class Times:
    """A time over all requests of an arm, in seconds; NaN if there are none."""

    median: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Times:
        return cls(*(quantile(values, share) for share in (0.5, 0.9, 0.99)))


@dataclass(frozen=True, slots=True)
class ServeRow:
    """One arm under one load; medians and intervals of the rounds, times over all whole answers.

    Attributes:
        load, arm: which.
        speed: tokens per second, prompts included.
        over_plain: its ratio to that of the same place without speculation in the same round; None where that is it.
        over_baseline: its ratio to the baseline's in the same round, in the same mode where there is that; None where
            it is the baseline itself.
        over_generate: at one request at a time, the gain over plain decoding beside LLM.generate's in the same round.
        over_alone: where something runs beside the load, the mean time between pieces over that without it in the same
            round.
        first_token, per_token, between, whole: time to the first token, time per token after it, time between two
            pieces of an answer, time to the end.
        between_mean: mean of the times between.
        requests: per second.
        goodput: requests per second that keep the goal; None without one.
        client: processor seconds of the client for each second of a window; None where the engine is in its process.
        failed: share of the requests that got no whole answer.
        same_text: share of the answers that are those of the same place without speculation; None without that.
        is_counted: tokens are counted by the server, not by pieces of text.
        samples: rounds.
    """

    load: Load
    arm: Arm
    speed: Interval
    over_plain: Interval | None
    over_baseline: Interval | None
    over_generate: Interval | None
    over_alone: Interval | None
    first_token: Times
    per_token: Times
    between: Times
    between_mean: float
    whole: Times
    requests: float
    goodput: float | None
    client: float | None
    failed: float
    same_text: float | None
    is_counted: bool
    samples: int


COLUMNS: Columns[ServeRow] = {
    "load, by": lambda row: f"{row.load.name}, {row.arm.name}",
    "tokens/s": lambda row: f"{row.speed:.1f}" + ("" if row.is_counted else " pieces"),
    "over plain": lambda row: decimal(row.over_plain),
    "over baseline": lambda row: decimal(row.over_baseline),
    "gain over generate's": lambda row: decimal(row.over_generate),
    "between pieces over alone": lambda row: decimal(row.over_alone),
    "first token ms": lambda row: _pair(row.first_token),
    "per token ms": lambda row: _pair(row.per_token),
    "between pieces ms": lambda row: _pair(row.between),
    "whole s": lambda row: f"{row.whole.median:.2f} ({row.whole.p90:.2f})",
    "requests/s": lambda row: f"{row.requests:.2f}",
    "good/s": lambda row: decimal(row.goodput),
    "client's CPU": lambda row: percent(row.client),
    "failed": lambda row: percent(row.failed),
    "same text": lambda row: percent(row.same_text),
}


def rows(measured: Sequence[Measured], goal: Goal, baseline: str) -> list[ServeRow]:
    """A row for each load and arm. baseline: a place."""
    return [_row(each, arm, goal, baseline) for each in measured for arm in each.windows]


def _row(measured: Measured, arm: Arm, goal: Goal, baseline: str) -> ServeRow:
    windows = measured.windows[arm]
    answers = [answer for window in windows for answer in window.answers]
    whole = [answer for answer in answers if answer.error is None]
    seconds = sum(window.seconds for window in windows)
    waits = [wait for answer in whole for wait in answer.waits] if not arm.is_alone else []
    plain, alone = _find(measured, arm.place, PLAIN), _find(measured, arm.place, "")
    base = _find(measured, baseline, arm.mode) or _find(measured, baseline, "")
    speeds = {each: [window.speed for window in found] for each, found in measured.windows.items()}
    return ServeRow(
        load=measured.load,
        arm=arm,
        speed=bootstrap(speeds[arm]),
        over_plain=None if plain in (None, arm) else _ratio(speeds[arm], speeds[plain]),
        over_baseline=None if base is None or base.place == arm.place else _ratio(speeds[arm], speeds[base]),
        over_generate=_over_generate(measured, arm, speeds),
        over_alone=None
        if arm.beside is None or alone is None
        else _ratio(_waits(windows), _waits(measured.windows[alone])),
        first_token=Times.of([each.first_token for each in whole if each.first_token is not None]),
        per_token=Times.of([each.per_token for each in whole if each.per_token is not None]),
        between=Times.of(waits),
        between_mean=statistics.fmean(waits) if waits else float("nan"),
        whole=Times.of([each.seconds for each in whole]),
        requests=len(whole) / seconds,
        goodput=sum(map(goal.is_kept, answers)) / seconds if goal.is_set else None,
        client=None if arm.place in (DRIVER, GENERATE) else sum(window.cpu_seconds for window in windows) / seconds,
        failed=1 - len(whole) / len(answers),
        same_text=None if plain in (None, arm) else same_texts(windows, measured.windows[plain]),
        is_counted=all(each.is_counted for each in whole),
        samples=len(windows),
    )


def same_texts(windows: Sequence[Window], others: Sequence[Window]) -> float | None:
    """Share of the requests answered by both whose texts are the same; None where there are none."""
    pairs = [
        (one.text, other.text)
        for window, beside in zip(windows, others, strict=True)
        for one, other in zip(window.answers, beside.answers, strict=True)
        if one.error is None and other.error is None
    ]
    return statistics.fmean(one == other for one, other in pairs) if pairs else None


def _over_generate(measured: Measured, arm: Arm, speeds: Mapping[Arm, Sequence[float]]) -> Interval | None:
    if arm.mode or arm.place == GENERATE:
        return None
    found = [_find(measured, place, mode) for place in (arm.place, GENERATE) for mode in ("", PLAIN)]
    mine, plain, alone, plain_alone = (speeds[each] if each is not None else None for each in found)
    if mine is None or plain is None or alone is None or plain_alone is None:
        return None
    if not all((*plain, *plain_alone)):
        return None
    gains = [a / b for a, b in zip(mine, plain, strict=True)]
    return _ratio(gains, [a / b for a, b in zip(alone, plain_alone, strict=True)])


def _ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Interval | None:
    """None where a window gave nothing to divide by."""
    return ratio(numerator, denominator) if all(each > 0 for each in denominator) else None


def _waits(windows: Sequence[Window]) -> list[float]:
    """Mean seconds between pieces, by window; 0 where there was no second piece."""
    return [statistics.fmean([wait for each in window.answers for wait in each.waits] or [0.0]) for window in windows]


def _find(measured: Measured, place: str, mode: str) -> Arm | None:
    """The arm at a place in a mode."""
    return next((arm for arm in measured.windows if (arm.place, arm.mode) == (place, mode)), None)


def _pair(times: Times) -> str:
    return "–" if times.median != times.median else f"{1e3 * times.median:.1f} ({1e3 * times.p90:.1f})"
