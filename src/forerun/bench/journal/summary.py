"""A server's journal as results: acceptance, time and tokens by category, with speculation and without."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from forerun.bench.report import Report, Table, decimal, percent
from forerun.config import NO_DRAFTER
from forerun.results import DrafterFacts, Figure, Results, TargetFacts
from forerun.traffic.reader import read_journal
from forerun.traffic.records import Answer

_HEADER = ("category", "drafter", "answers", "prompt", "answer", "tokens a forward", "accepted", "first token ms",
           "p90", "ms a token", "seconds")  # fmt: skip


def journal_results(path: Path) -> Results:
    """The journal of a server as results.

    Raises:
        ConfigError: as `read_journal`.
    """
    traffic = read_journal(path)
    groups: defaultdict[tuple[str, str], list[Answer]] = defaultdict(list)
    for answer in traffic.answers:
        for category in {"", answer.category}:
            groups[category, answer.drafter].append(answer)
    rows: list[list[str]] = []
    figures: list[Figure] = []
    for (category, drafter), answers in sorted(groups.items()):
        values = _values(answers)
        labels = {"category": category, "method": drafter}
        figures += [
            Figure(name, labels, value, samples=len(answers)) for name, value in values.items() if value is not None
        ]
        rows.append([category or "all", drafter, str(len(answers)), *_cells(answers, values)])
    left_out = f"{traffic.num_damaged} damaged lines and {traffic.num_other} answers of another model or machine"
    names = sorted({answer.drafter for answer in traffic.answers} - {NO_DRAFTER})
    report = Report(
        "journal",
        [Table(f"Answers by category; lengths are medians in tokens. Left out: {left_out}", _HEADER, rows)],
        TargetFacts(traffic.begun.model, traffic.begun.number_format),
        [DrafterFacts(name, name) for name in names],
        figures=figures,
    )
    return report.results(f"forerun serve --journal {path.name}", traffic.begun.environment)


def _values(answers: Sequence[Answer]) -> dict[str, float | None]:
    """The figures of answers of one category and drafter; None where there is nothing to divide by."""
    first = [each.first for each in answers]
    later = sum(each.tokens - 1 for each in answers if each.tokens)
    return {
        "acceptance_length": _ratio(sum(each.tokens for each in answers), sum(each.forwards for each in answers)),
        "acceptance_rate": _ratio(sum(each.accepted for each in answers), sum(each.drafted for each in answers)),
        "first_token": statistics.median(first),
        "first_token_p90": float(np.quantile(first, 0.9)),
        "per_token": _ratio(sum(max(each.seconds - each.first, 0.0) for each in answers), later),
    }


def _cells(answers: Sequence[Answer], values: dict[str, float | None]) -> list[str]:
    """What stands in the table beside a row's names and number."""
    return [
        f"{statistics.median(each.prompt for each in answers):.0f}",
        f"{statistics.median(each.tokens for each in answers):.0f}",
        decimal(values["acceptance_length"]),
        percent(values["acceptance_rate"]),
        *("–" if each is None else f"{1e3 * each:.1f}" for each in list(values.values())[2:]),
        f"{sum(each.seconds for each in answers):.1f}",
    ]


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None
