"""A journal's figures: what happened by category, and what replays say would have happened."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from forerun.bench.journal.outcomes import ALL, Answers, Outcome
from forerun.bench.journal.scenarios import AS_IT_WAS, OtherDrafter, Scenarios
from forerun.bench.measure import LEVEL, RESAMPLES
from forerun.bench.report import Report, Table, decimal, percent
from forerun.results import DrafterFacts, Figure, TargetFacts
from forerun.results.schema import Labels
from forerun.traffic.reader import Traffic
from forerun.traffic.records import Answer, Steps

_SHARES = (0.5, 0.25, 0.75, 0.05, 0.95)
"""Quantiles of a spread, in the order in which a picture's points have them."""
_POSITIONS = 12
_LEAST_REACHED = 20


def make_report(traffic: Traffic, drafter: OtherDrafter | None, settings: Mapping[str, object]) -> Report:
    """The journal as a report."""
    scenarios, begun = Scenarios.of(traffic), traffic.begun
    answers = Answers.of(scenarios, drafter)
    categories = [ALL, *sorted({each.category for each in traffic.answers} - {ALL})]
    tables = [_ways(answers), _by_category(traffic, answers, categories), _trust(traffic, scenarios, answers)]
    figures = [
        *_measured(traffic, categories),
        *_replayed(answers, categories),
        *_steps(traffic),
        *_decided(traffic),
    ]
    drafters = [] if begun.drafter == "none" else [DrafterFacts(begun.drafter, begun.drafter, [begun.num_draft_tokens])]
    return Report(
        "journal",
        tables,
        TargetFacts(begun.model, begun.number_format, exact=begun.exact),
        drafters,
        settings,
        figures=figures,
        details={"spread": _spreads(answers.measured, categories), "served_by": dict(begun.machine)},
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


def _by_category(traffic: Traffic, answers: Answers, categories: Sequence[str]) -> Table:
    header = ["category", "answers", "prompt", "answer", "tokens a forward", "accepted", "mean K", "drafted in"]
    rows = []
    for category in categories:
        mine = _of(traffic, category)
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


def _measured(traffic: Traffic, categories: Sequence[str]) -> Iterator[Figure]:
    """Acceptance, with intervals over answers."""
    for category in categories:
        mine = [each for each in _of(traffic, category) if each.forwards]
        labels = {"method": traffic.begun.drafter, "category": category}
        for name, above, below in (
            ("acceptance_length", "tokens", "forwards"),
            ("acceptance_rate", "accepted", "drafted"),
        ):
            sums = np.array([[getattr(each, above), getattr(each, below)] for each in mine], dtype=float)
            if len(sums) and sums[:, 1].sum():
                yield Figure(name, labels, *_ratio_of_sums(sums), samples=len(sums))
        for place in range(_POSITIONS):
            there = [each for each in mine if len(each.reached) > place]
            taken = [each.accepted_at[place] if len(each.accepted_at) > place else 0 for each in there]
            sums = np.array([taken, [each.reached[place] for each in there]], dtype=float).T
            if sums[:, 1].sum() >= _LEAST_REACHED:
                yield Figure(
                    "position_acceptance", {**labels, "position": place + 1}, *_ratio_of_sums(sums), len(there)
                )


def _replayed(answers: Answers, categories: Sequence[str]) -> Iterator[Figure]:
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


def _spreads(measured: Outcome, categories: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Times by category as quantiles, for pictures."""
    parts: Mapping[str, Mapping[str, Sequence[float]]] = {"first": measured.first, "per_token": measured.per_token}
    return {
        name: {
            category or "all": [float(np.quantile(each[category], share)) for share in _SHARES]
            for category in categories
            if each.get(category)
        }
        for name, each in parts.items()
    }


def _ratio_of_sums(sums: np.ndarray) -> tuple[float, float | None, float | None]:
    """Σ of the first column over Σ of the second, with the bootstrap interval of drawing rows again."""
    value = float(sums[:, 0].sum() / sums[:, 1].sum())
    if len(sums) < 2:
        return value, None, None
    generator, ratios = np.random.default_rng(0), []
    for _ in range(RESAMPLES // 4):
        drawn = sums[generator.integers(0, len(sums), len(sums))].sum(0)
        if drawn[1]:
            ratios.append(drawn[0] / drawn[1])
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return value, float(low), float(high)


def _of(traffic: Traffic, category: str) -> list[Answer]:
    return [each for each in traffic.answers if category in (ALL, each.category)]


def _milliseconds(values: Sequence[float], share: float, digits: int = 0) -> str:
    return f"{1e3 * float(np.quantile(values, share)):.{digits}f}" if len(values) else "–"
