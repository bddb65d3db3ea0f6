"""A journal's figures: what happened by category, and what replays say would have happened."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from forerun.bench.journal.outcomes import Answers, Outcome
from forerun.bench.journal.scenarios import ALL, AS_IT_WAS, OtherDrafter, Scenarios
from forerun.bench.measure import RESAMPLES
from forerun.bench.report import Report, Table, decimal, percent
from forerun.bench.summary.chart import SPREAD_SHARES
from forerun.bench.summary.series import LEAST_REACHED, POSITIONS, ratio_of_sums
from forerun.config import NO_DRAFTER
from forerun.results import DrafterFacts, Figure, TargetFacts
from forerun.results.schema import Labels
from forerun.traffic.reader import Traffic
from forerun.traffic.records import Answer, Steps

_RESAMPLES = RESAMPLES // 4
"""Answers are many."""


def make_report(traffic: Traffic, drafter: OtherDrafter | None, settings: Mapping[str, object]) -> Report:
    """The journal as a report."""
    scenarios, begun = Scenarios.of(traffic), traffic.begun
    answers = Answers.of(scenarios, drafter)
    by_category = _grouped(traffic.answers)
    tables = [_ways(answers), _by_category(by_category, answers), _trust(traffic, scenarios, answers)]
    figures = [
        *_measured(begun.drafter, by_category),
        *_replayed(answers, by_category),
        *_steps(traffic),
        *_decided(traffic),
    ]
    told = DrafterFacts(begun.drafter, begun.drafter, [begun.num_draft_tokens])
    return Report(
        "journal",
        tables,
        TargetFacts(begun.model, begun.number_format, exact=begun.exact),
        [] if begun.drafter == NO_DRAFTER else [told],
        settings,
        figures=figures,
        details={"spread": _spreads(answers.measured, by_category), "served_by": dict(begun.machine)},
    )


def _ways(answers: Answers) -> Table:
    """The traffic in each way."""
    header = ["served", "engine busy, s", "tokens/s while busy", "first token ms", "p90", "ms a token", "over plain"]
    rows = []
    for outcome in filter(None, (answers.measured, answers.replayed, answers.plain, answers.other)):
        ratio = None if outcome is answers.measured else answers.over_plain(outcome)
        error = answers.error()
        rows.append(
            [
                outcome.name if outcome is answers.measured else f"{outcome.name}, by replay",
                f"{outcome.busy:.1f}",
                f"{outcome.tokens / outcome.busy:.1f}" if outcome.busy else "–",
                _milliseconds(outcome.first[ALL], 0.5),
                _milliseconds(outcome.first[ALL], 0.9),
                _milliseconds(outcome.per_token.get(ALL, ()), 0.5, digits=1),
                "" if ratio is None or outcome is answers.plain else f"{ratio:.2f} ± {error * ratio:.2f}",
            ]
        )
    return Table("The same requests at the same moments", header, rows)


def _by_category(by_category: Mapping[str, Sequence[Answer]], answers: Answers) -> Table:
    header = ["category", "answers", "prompt", "answer", "tokens a forward", "accepted", "mean K", "drafted in"]
    rows = []
    for category, mine in by_category.items():
        asked = sum(each.forwards - each.plain_forwards for each in mine)
        forwards = sum(each.forwards for each in mine)
        ratio = answers.over_plain(answers.replayed, category)
        drafted = sum(each.drafted for each in mine)
        rows.append(
            [
                category or "all",
                str(len(mine)),
                f"{statistics.median(each.prompt for each in mine):.0f}",
                f"{statistics.median(each.tokens for each in mine):.0f}",
                decimal(sum(each.tokens for each in mine) / forwards if forwards else None),
                percent(sum(each.accepted for each in mine) / drafted if drafted else None),
                decimal(sum(each.asked for each in mine) / asked if asked else None),
                percent(asked / forwards if forwards else None),
                "–" if ratio is None else f"{ratio:.2f} ± {answers.error(category) * ratio:.2f}",
            ]
        )
    return Table("By category; lengths are medians in tokens", [*header, "over plain"], rows)


def _trust(traffic: Traffic, scenarios: Scenarios, answers: Answers) -> Table:
    """What the replays rest on."""
    decoding, busy = answers.replayed.decoding[ALL] / max(answers.measured.decoding[ALL], 1e-9), answers.measured.busy
    rows = [
        ["error of the replay of what happened, time after first tokens", f"{100 * (decoding - 1):+.1f} %"],
        ["the same, time that the engine was busy", f"{100 * (answers.replayed.busy / max(busy, 1e-9) - 1):+.1f} %"],
        ["seconds that the prices put into wrong kinds of steps", percent(scenarios.prices.residual)],
        ["plain decoding priced by steps without drafts that were seen", percent(answers.plain_seen)],
        ["answers, of runs", f"{len(traffic.answers)}, {len(traffic.runs)}"],
        ["answers of other models, drafters or machines, left out", str(traffic.num_other)],
        ["lines that could not be read", str(traffic.num_damaged)],
    ]
    return Table("What the replays rest on", ["", "value"], rows)


def _measured(drafter: str, by_category: Mapping[str, Sequence[Answer]]) -> Iterator[Figure]:
    """Acceptance, with intervals over answers."""
    for category, answers in by_category.items():
        mine = [each for each in answers if each.forwards]
        labels: Labels = {"method": drafter, "category": category}
        for name, above, below in (
            ("acceptance_length", [each.tokens for each in mine], [each.forwards for each in mine]),
            ("acceptance_rate", [each.accepted for each in mine], [each.drafted for each in mine]),
        ):
            if sum(below):
                yield Figure(name, labels, *ratio_of_sums(above, below, _RESAMPLES), samples=len(mine))
        for place in range(POSITIONS):
            there = [each for each in mine if len(each.reached) > place]
            taken = [each.accepted_at[place] if len(each.accepted_at) > place else 0 for each in there]
            reached = [each.reached[place] for each in there]
            if sum(reached) >= LEAST_REACHED:
                at = {**labels, "position": place + 1}
                yield Figure("position_acceptance", at, *ratio_of_sums(taken, reached, _RESAMPLES), len(there))


def _replayed(answers: Answers, categories: Collection[str]) -> Iterator[Figure]:
    """Speed over plain decoding; the bounds are the replay's error."""
    for outcome in filter(None, (answers.replayed, answers.other)):
        for category in categories:
            value = answers.over_plain(outcome, category)
            if value is not None:
                wide = answers.error(category) * value
                labels = {"method": outcome.name, "category": category, "part": "replay"}
                yield Figure("over_plain", labels, value, value - wide, value + wide)
    for outcome in filter(None, (answers.measured, answers.replayed, answers.plain, answers.other)):
        if outcome.busy:
            yield Figure("tokens_per_second", {"method": outcome.name}, outcome.tokens / outcome.busy)
    if answers.measured.decoding[ALL]:
        missed = answers.replayed.decoding[ALL] / answers.measured.decoding[ALL] - 1
        yield Figure("replay_error", {"method": AS_IT_WAS}, missed)


def _steps(traffic: Traffic) -> Iterator[Figure]:
    """Time of steps without prompts by sequences, with drafts and without."""
    sums: dict[tuple[str, int], Steps] = {}
    for each in traffic.steps:
        if not each.prompt and each.decoding:
            key = "with drafts" if each.drafted else "without drafts", each.decoding
            sums.setdefault(key, Steps(each.decoding, 0, 0)).add(each)
    for (method, decoding), steps in sorted(sums.items()):
        mean, half = steps.mean
        labels: Labels = {"method": method, "sequences": decoding}
        yield Figure("step", labels, mean, mean - half, mean + half, steps.count)


def _decided(traffic: Traffic) -> Iterator[Figure]:
    """Shares of forwards by what was decided."""
    counts: defaultdict[str, int] = defaultdict(int)
    for each in traffic.answers:
        for decision, count in each.decisions.items():
            counts[decision] += count
    for decision, count in sorted(counts.items(), key=lambda pair: -pair[1]):
        yield Figure("decided", {"method": decision}, count / sum(counts.values()), samples=count)


def _spreads(measured: Outcome, categories: Collection[str]) -> dict[str, dict[str, list[float]]]:
    """Times by category as quantiles, for pictures."""
    parts: Mapping[str, Mapping[str, Sequence[float]]] = {"first": measured.first, "per_token": measured.per_token}
    return {
        name: {
            category or "all": [float(np.quantile(each[category], share)) for share in SPREAD_SHARES]
            for category in categories
            if each.get(category)
        }
        for name, each in parts.items()
    }


def _grouped(answers: Sequence[Answer]) -> dict[str, Sequence[Answer]]:
    """By category, all together first."""
    found: defaultdict[str, list[Answer]] = defaultdict(list)
    for each in answers:
        found[each.category].append(each)
    return {ALL: answers, **{category: found[category] for category in sorted(found) if category != ALL}}


def _milliseconds(values: Sequence[float], share: float, digits: int = 0) -> str:
    return f"{1e3 * float(np.quantile(values, share)):.{digits}f}" if len(values) else "–"
