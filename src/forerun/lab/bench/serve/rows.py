"""From windows of load to a row for each arm: speeds, their ratios, times, goodput; its table, figures and runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from forerun.lab.bench.measure import Interval, bootstrap, quantile, ratio
from forerun.lab.bench.recorded import figures_of
from forerun.lab.bench.serve.load import DRIVER, PLAIN, Load, LoadWindow, MeasuredLoad, ServingArm
from forerun.lab.bench.serve.requests import TimedRequest
from forerun.lab.bench.tables import Columns, Table, decimal, percent
from forerun.lab.results.files import without_folders
from forerun.lab.results.schema import Figure, Labels, RunRow

GOALS = {"first": "first_token", "token": "per_token", "whole": "seconds"}
"""The times that a goal may bound, and the attribute of an answer that each is about."""
Goal = Mapping[str, float]
"""Attribute of an answer -> seconds; empty without a goal."""


def is_kept(goal: Goal, answer: TimedRequest) -> bool:
    """Return whether a complete answer came within these times."""
    times = {name: getattr(answer, name) for name in goal}
    return answer.error is None and all(time is None or time <= goal[name] for name, time in times.items())


@dataclass(frozen=True, slots=True)
class TimeSummary:
    """A time over all requests of an arm, in seconds; NaN if there are none."""

    median: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> TimeSummary:
        """Summarise the values that are known."""
        known = [value for value in values if value is not None]
        return cls(*(quantile(known, share) for share in (0.5, 0.9, 0.99)))

    def __str__(self) -> str:
        """Format as milliseconds, the 90th percentile in parentheses."""
        return "–" if self.median != self.median else f"{1e3 * self.median:.1f} ({1e3 * self.p90:.1f})"


@dataclass(frozen=True, slots=True)
class ServeRow:
    """One arm under one load; medians and intervals of the rounds, times over all whole answers.

    Attributes:
        load, arm: which.
        speed: tokens per second, prompts included.
        over_plain: its ratio to that of the same server without speculation in the same round; None for the latter.
        over_baseline: its ratio to the baseline's in the same round, in the same mode where there is that; None where
            it is the baseline itself.
        first_token, per_token, between, whole: time to the first token, time per token after it, time between two
            pieces of an answer, time to the end.
        requests: per second.
        goodput: requests per second that keep the goal; None without one.
        client: processor seconds of the client for each second of a window; None where the engine is in its process.
        failed: share of the requests that got no whole answer.
        same_text: share of the answers that are those of the same server without speculation; None without that.
        is_counted: tokens are counted by the server, not by pieces of text.
        samples: rounds.
    """

    load: Load
    arm: ServingArm
    speed: Interval
    over_plain: Interval | None
    over_baseline: Interval | None
    first_token: TimeSummary
    per_token: TimeSummary
    between: TimeSummary
    whole: TimeSummary
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
    "first token ms": lambda row: str(row.first_token),
    "per token ms": lambda row: str(row.per_token),
    "between pieces ms": lambda row: str(row.between),
    "whole s": lambda row: f"{row.whole.median:.2f} ({row.whole.p90:.2f})",
    "requests/s": lambda row: f"{row.requests:.2f}",
    "good/s": lambda row: decimal(row.goodput),
    "client's CPU": lambda row: percent(row.client),
    "failed": lambda row: percent(row.failed),
    "same text": lambda row: percent(row.same_text),
}
_OPTIONAL = ("over plain", "over baseline", "good/s", "failed", "same text")
"""Columns that are left out where they are empty in all rows."""


def rows(measured: Sequence[MeasuredLoad], goal: Goal, baseline: str) -> list[ServeRow]:
    """Make a row for each load and arm. baseline: a place."""
    return [_row(each, arm, goal, baseline) for each in measured for arm in each.windows]


def _row(measured: MeasuredLoad, arm: ServingArm, goal: Goal, baseline: str) -> ServeRow:
    windows = measured.windows[arm]
    answers = [answer for window in windows for answer in window.answers]
    whole = [answer for answer in answers if answer.error is None]
    seconds = sum(window.seconds for window in windows)
    plain = _find(measured, arm.server, PLAIN)
    base = _find(measured, baseline, arm.mode) or _find(measured, baseline, "")
    plain_windows = None if plain in (None, arm) else measured.windows[plain]
    return ServeRow(
        load=measured.load,
        arm=arm,
        speed=bootstrap([window.speed for window in windows]),
        over_plain=None if plain_windows is None else _ratio(windows, plain_windows),
        over_baseline=None if base is None or base.server == arm.server else _ratio(windows, measured.windows[base]),
        first_token=TimeSummary.of([each.first_token for each in whole]),
        per_token=TimeSummary.of([each.per_token for each in whole]),
        between=TimeSummary.of([wait for answer in whole for wait in answer.waits]),
        whole=TimeSummary.of([each.seconds for each in whole]),
        requests=len(whole) / seconds,
        goodput=sum(is_kept(goal, answer) for answer in answers) / seconds if goal else None,
        client=None if arm.server == DRIVER else sum(window.cpu_seconds for window in windows) / seconds,
        failed=1 - len(whole) / len(answers),
        same_text=None if plain_windows is None else same_texts(windows, plain_windows),
        is_counted=all(each.is_counted for each in whole),
        samples=len(windows),
    )


def same_texts(windows: Sequence[LoadWindow], reference: Sequence[LoadWindow]) -> float | None:
    """Return the share of the requests answered by both whose texts are the same; None where there are none."""
    pairs = [
        (one.text, other.text)
        for window, beside in zip(windows, reference, strict=True)
        for one, other in zip(window.answers, beside.answers, strict=True)
        if one.error is None and other.error is None
    ]
    return statistics.fmean(one == other for one, other in pairs) if pairs else None


def _ratio(windows: Sequence[LoadWindow], reference: Sequence[LoadWindow]) -> Interval | None:
    """Return the ratio of speeds; None where a window has nothing to divide by."""
    speeds = [window.speed for window in reference]
    return ratio([window.speed for window in windows], speeds) if all(each > 0 for each in speeds) else None


def _find(measured: MeasuredLoad, server: str, mode: str) -> ServingArm | None:
    """Return the arm at a place in a mode."""
    return next((arm for arm in measured.windows if (arm.server, arm.mode) == (server, mode)), None)


def serve_table(title: str, rows: Sequence[ServeRow], baseline: str) -> Table:
    """Make the table, without columns that are empty in all rows. baseline: the name for its column."""
    shown = {
        name: cell
        for name, cell in COLUMNS.items()
        if name not in _OPTIONAL or any(cell(row) not in ("–", "0 %") for row in rows)
    }
    return Table.of(title, {name.replace("baseline", baseline): cell for name, cell in shown.items()}, rows)


def figures(rows: Sequence[ServeRow]) -> list[Figure]:
    """Return a figure for every number of the rows."""
    found: list[Figure] = []
    for row in rows:
        values: dict[str, Interval | float | None] = {
            "tokens_per_second": row.speed,
            "over_plain": row.over_plain,
            "over_baseline": row.over_baseline,
            "requests_per_second": row.requests,
            "goodput": row.goodput,
            "client_cpu": row.client,
            "failed": row.failed,
            "same_text": row.same_text,
        }
        for name, times in (
            ("first_token", row.first_token),
            ("per_token", row.per_token),
            ("between_pieces", row.between),
            ("whole_request", row.whole),
        ):
            values |= {name: times.median, f"{name}_p90": times.p90, f"{name}_p99": times.p99}
        numbers = {name: value for name, value in values.items() if value == value}  # NaN: there was nothing to time
        load: Labels = {"part": "loop", "outstanding": row.load.concurrency or 1}
        if row.load.rate is not None:
            load = {"part": "open", "rate": row.load.rate}
        found += figures_of({**load, "method": row.arm.name}, numbers, row.samples)
    return found


def serve_run_rows(measured: MeasuredLoad, temperature: float) -> Iterator[RunRow]:
    """Yield a row for every request with a complete answer."""
    plains = {arm.server: windows for arm, windows in measured.windows.items() if arm.mode == PLAIN}
    for arm, windows in measured.windows.items():
        for round_number, window in enumerate(windows):
            beside = plains[arm.server][round_number].answers if arm.server in plains and arm.mode != PLAIN else None
            for number, answer in enumerate(window.answers):
                if answer.error is not None:
                    continue
                yield RunRow(
                    prompt=answer.request.prompt,
                    method=without_folders(f"{arm.name}, {measured.load.name}"),
                    drafter="",
                    temperature=temperature,
                    round=round_number,
                    num_tokens=answer.num_tokens,
                    seconds=answer.seconds,
                    num_forwards=answer.num_forwards,
                    num_drafted=answer.num_drafted,
                    num_accepted=answer.num_accepted,
                    first_token=answer.first_token,
                    same_text=None if beside is None else beside[number].text == answer.text,
                )


def prompt_tokens(measured: Sequence[MeasuredLoad]) -> dict[int, int]:
    """Return the tokens of each prompt, as the first server that counted them reports."""
    windows = [window for each in measured for made in each.windows.values() for window in made]
    answers = [answer for window in reversed(windows) for answer in reversed(window.answers)]
    return {answer.request.prompt: answer.prompt_tokens for answer in answers if answer.prompt_tokens is not None}
