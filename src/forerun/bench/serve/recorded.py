"""What servers under load gave, in the schema of results: runs, figures, the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from forerun.bench.measure import Interval
from forerun.bench.recorded import figures_of
from forerun.bench.report import Table
from forerun.bench.serve.arm import PLAIN
from forerun.bench.serve.measure import Measured
from forerun.bench.serve.rows import COLUMNS, ServeRow
from forerun.results import Figure, RunRow
from forerun.results.schema import Labels
from forerun.results.write import without_folders

_ALWAYS = ("load, by", "tokens/s", "first token ms", "per token ms", "between pieces ms", "whole s", "client's CPU")
_EMPTY = ("–", "0 %")


def table(title: str, rows: Sequence[ServeRow], baseline: str) -> Table:
    """The rows, without columns that say nothing of any of them. baseline: what its column is called after."""
    made = Table.of(title, COLUMNS, rows)
    shown = [
        place
        for place, name in enumerate(made.header)
        if name in _ALWAYS or any(row[place] not in _EMPTY for row in made.rows)
    ]
    header = [made.header[place].replace("baseline", baseline) for place in shown]
    return Table(title, header, [[row[place] for place in shown] for row in made.rows])


def figures(rows: Sequence[ServeRow]) -> list[Figure]:
    """A figure for every number of the rows."""
    found: list[Figure] = []
    for row in rows:
        values: dict[str, Interval | float | None] = {
            "tokens_per_second": row.speed,
            "over_plain": row.over_plain,
            "over_baseline": row.over_baseline,
            "over_generate": row.over_generate,
            "between_over_alone": row.over_alone,
            "between_mean": row.between_mean,
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
        found += figures_of(labels(row), numbers, row.samples)
    return found


def labels(row: ServeRow) -> Labels:
    """What the figures of a row are of."""
    load = row.load
    if load.rate is not None:
        return {"part": "open", "rate": load.rate, "method": row.arm.name}
    return {"part": "loop", "outstanding": load.concurrency or 1, "method": row.arm.name}


def run_rows(measured: Sequence[Measured], temperature: float) -> list[RunRow]:
    """Every request that got a whole answer."""
    return [row for each in measured for row in _runs(each, temperature)]


def _runs(measured: Measured, temperature: float) -> Iterator[RunRow]:
    plains = {arm.place: windows for arm, windows in measured.windows.items() if arm.mode == PLAIN}
    for arm, windows in measured.windows.items():
        for number, window in enumerate(windows):
            beside = plains[arm.place][number].answers if arm.place in plains else None
            for place, answer in enumerate(window.answers):
                if answer.error is not None:
                    continue
                yield RunRow(
                    prompt=answer.ask.prompt,
                    method=without_folders(f"{arm.name}, {measured.load.name}"),
                    drafter="",
                    temperature=temperature,
                    round=number,
                    num_tokens=answer.num_tokens,
                    seconds=answer.seconds,
                    num_forwards=answer.num_forwards,
                    num_drafted=answer.num_drafted,
                    num_accepted=answer.num_accepted,
                    first_token=answer.first_token,
                    same_text=None if beside is None or arm.mode == PLAIN else beside[place].text == answer.text,
                )


def prompt_tokens(measured: Sequence[Measured]) -> dict[int, int]:
    """Tokens of prompts, by their place, as the first who told counted them."""
    found: dict[int, int] = {}
    for each in measured:
        for windows in each.windows.values():
            for answer in (answer for window in windows for answer in window.answers):
                if answer.prompt_tokens is not None:
                    found.setdefault(answer.ask.prompt, answer.prompt_tokens)
    return found
