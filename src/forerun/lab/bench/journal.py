"""A server's journal as results: acceptance, time and tokens by category, with speculation and without."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forerun.config import NO_DRAFTER
from forerun.errors import ConfigError
from forerun.lab.bench.tables import Report, Table, decimal, percent
from forerun.lab.results.files import read_into
from forerun.lab.results.schema import DrafterFacts, Figure, Results, TargetFacts
from forerun.server.traffic_records import FORMAT, REMEDY, AnswerRecord, ServerRunRecord, check_head
from forerun.utils.json_file import Fields

_MOST_LINE = 1 << 22
"""Bytes of a line; a longer one is damage."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The answers of a journal.

    Attributes:
        begun: the last run that answered.
        answers: of all runs of its model, on its machine, in the order in which they ended.
        num_damaged: lines that could not be read, such as one that a crash has cut short.
        num_other: answers of runs with another model or machine, which are left out.
    """

    begun: ServerRunRecord
    answers: list[AnswerRecord]
    num_damaged: int
    num_other: int


def is_journal(path: Path) -> bool:
    """Return whether a file begins as journals do."""
    try:
        with path.open("rb") as file:
            return FORMAT.encode() in file.readline(1 << 16)
    except OSError:
        return False


def read_journal(path: Path) -> Traffic:
    """Read a journal, and the older part beside it, FILE.1.

    Raises:
        ConfigError: it cannot be read, is no journal, or holds no answers.
    """
    older = path.with_name(path.name + ".1")
    held: list[tuple[ServerRunRecord, AnswerRecord]] = []
    damaged = 0
    for part in ([older] if older.is_file() else []) + [path]:
        begun: ServerRunRecord | None = None
        for number, content in enumerate(_lines(part)):
            try:
                found = Fields.parse(content, f"{part}, line {number + 1}", ConfigError, remedy=REMEDY)
                if "format" in found.values or begun is None:
                    check_head(found)
                    begun = read_into(ServerRunRecord, found)
                else:
                    held.append((begun, read_into(AnswerRecord, found)))
            except ConfigError:
                if begun is None:
                    raise
                damaged += 1
        if begun is None:
            raise ConfigError(f"{part}: it is empty. {REMEDY}")
    if not held:
        raise ConfigError(
            f"{path}: it holds no complete answers. Let the server answer some requests, or give another journal."
        )
    last = held[-1][0]
    answers = [answer for begun, answer in held if begun.setting == last.setting]
    return Traffic(last, answers, damaged, len(held) - len(answers))


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while content := file.readline(_MOST_LINE):
                yield content
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. {REMEDY}") from None


_HEADER = ("category", "drafter", "answers", "prompt", "answer", "tokens a forward", "accepted", "first token ms",
           "p90", "ms a token", "seconds")  # fmt: skip


def journal_results(path: Path) -> Results:
    """Convert the journal of a server to results.

    Raises:
        ConfigError: as `read_journal`.
    """
    traffic = read_journal(path)
    groups: defaultdict[tuple[str, str], list[AnswerRecord]] = defaultdict(list)
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


def _values(answers: Sequence[AnswerRecord]) -> dict[str, float | None]:
    """Return the figures of answers of one category and drafter; None where there is nothing to divide by."""
    first = [each.first for each in answers]
    later = sum(each.tokens - 1 for each in answers if each.tokens)
    return {
        "acceptance_length": _ratio(sum(each.tokens for each in answers), sum(each.forwards for each in answers)),
        "acceptance_rate": _ratio(sum(each.accepted for each in answers), sum(each.drafted for each in answers)),
        "first_token": statistics.median(first),
        "first_token_p90": float(np.quantile(first, 0.9)),
        "per_token": _ratio(sum(max(each.seconds - each.first, 0.0) for each in answers), later),
    }


def _cells(answers: Sequence[AnswerRecord], values: dict[str, float | None]) -> list[str]:
    """Return the cells of a table row after names and number of answers."""
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
