"""Conversion of measurements to the schema of results: runs of prompts, figures with intervals, the target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.lab.bench.acceptance import AcceptanceRow
from forerun.lab.bench.compare import MethodRow, MethodRun
from forerun.lab.bench.forward import ForwardRow, Roof
from forerun.lab.bench.generate import POSITIONS
from forerun.lab.bench.measure import Interval, Timed, is_cost_padded
from forerun.lab.bench.prompts import BenchPrompt
from forerun.lab.bench.quality import QualityRow
from forerun.lab.results.files import without_folders
from forerun.lab.results.schema import DrafterFacts, Figure, Labels, PromptFacts, RunRow, TargetFacts
from forerun.models import LanguageModel, number_format
from forerun.utils.files import digest


def target_facts(name: str | Path, model: LanguageModel, *, random_weights: bool = False) -> TargetFacts:
    """Describe the model that was measured."""
    return TargetFacts(
        name=without_folders(str(name)),
        number_format=number_format(model),
        quantize=model.quantize,
        adapter=None if model.adapter is None else without_folders(model.adapter),
        cost_padded=is_cost_padded(name),
        random_weights=random_weights,
        exact=model.exactness.exact,
        num_parameters=model.num_parameters,
    )


def drafter_facts(chosen: Mapping[str, str], counts: Sequence[int | str]) -> list[DrafterFacts]:
    """Describe drafters. chosen: name -> the drafter's text. counts: values of K."""
    return [DrafterFacts(without_folders(name), without_folders(text), counts) for name, text in chosen.items()]


def prompt_facts(workload: str, requests: Iterable[BenchPrompt]) -> list[PromptFacts]:
    """Describe the prompts of one workload."""
    name = without_folders(workload)
    return [
        PromptFacts(
            request.name, name, request.category, len(request.token_ids), digest(repr(request.token_ids).encode())[:16]
        )
        for request in requests
    ]


def run_rows(
    runs: Mapping[str, Sequence[Timed[MethodRun]]],
    drafters: Mapping[str, str],
    plain: str,
    temperature: float,
    rounds: int,
    first: int,
) -> list[RunRow]:
    """Convert every run of every method to a row.

    Args:
        runs: by method; run i is of prompt i // rounds.
        drafters: method -> drafter's name.
        plain: the method whose texts the others' are compared with.
        first: the index of the first prompt.
    """
    return [
        RunRow(
            prompt=first + index // rounds,
            method=without_folders(method),
            drafter=without_folders(drafters.get(method, "")),
            temperature=temperature,
            round=index % rounds,
            num_tokens=len(run.value.token_ids),
            seconds=run.seconds,
            num_forwards=run.value.num_forwards,
            num_drafted=run.value.num_drafted,
            num_accepted=run.value.num_accepted,
            reached=run.value.reached,
            accepted=run.value.accepted,
            first_token=run.value.first_seconds,
            same_text=list(run.value.token_ids) == list(base.value.token_ids),
        )
        for method, timed in runs.items()
        for index, (run, base) in enumerate(zip(timed, runs[plain], strict=True))
    ]


def figures_of(
    labels: Labels, values: Mapping[str, Interval | float | None], samples: int | None = None
) -> list[Figure]:
    """Return a figure for each value that is known; a median has its interval."""
    return [
        Figure(name, labels, value.median, value.low, value.high, samples)
        if isinstance(value, Interval)
        else Figure(name, labels, value, samples=samples)
        for name, value in values.items()
        if value is not None
    ]


_OF_METHOD: Mapping[str, str] = {
    "tokens_per_second": "tokens_per_second",
    "over_plain": "over_plain",
    "over_transformers": "over_transformers",
    "over_assisted": "over_assisted",
    "acceptance_length": "mean_acceptance_length",
    "acceptance_rate": "acceptance_rate",
    "first_token": "first_token",
    "first_token_p90": "first_token_p90",
    "same_text": "same_text",
}
"""Figure -> the field of a method's row."""


def method_figures(
    workload: str, temperature: float, measured: Mapping[str, Sequence[MethodRow]], drafters: Mapping[str, str]
) -> list[Figure]:
    """Return the figures of the methods on one workload. measured: rows by category. drafters: method -> drafter's
    name."""
    found: list[Figure] = []
    for category, rows in measured.items():
        for row in rows:
            labels: dict[str, Any] = {
                "workload": without_folders(workload),
                "category": category,
                "temperature": temperature,
                "method": without_folders(row.method),
                "drafter": without_folders(drafters.get(row.method, "")),
            }
            values = {name: getattr(row, field) for name, field in _OF_METHOD.items()}
            found += figures_of(labels, values, row.num_runs)
            for position, share in enumerate(row.acceptance_per_position[:POSITIONS], 1):
                found.append(Figure("position_acceptance", {**labels, "position": position}, share))
    return found


ROOFLINE = "roofline"
"""As a method."""


def forward_figures(rows: Sequence[ForwardRow], prefix: int, rounds: int, roof: Roof) -> list[Figure]:
    """Return the times of forwards, and the roofline beside them."""
    found: list[Figure] = []
    for row in rows:
        labels: dict[str, Any] = {"dtype": row.dtype, "method": row.method, "rows": row.rows, "prefix": prefix}
        values = {
            "forward": row.seconds,
            "forward_over_transformers": row.over_transformers,
            "forward_growth": row.growth,
        }
        found += figures_of(labels, values, rounds)
    for (dtype, k), row in {(row.dtype, row.rows): row for row in rows}.items():
        labels = {"dtype": dtype, "method": ROOFLINE, "rows": k, "prefix": prefix}
        found.append(Figure(ROOFLINE, labels, roof.seconds(row.parameters, row.nbytes, dtype, k)))
    return found


def acceptance_figures(rows: Sequence[AcceptanceRow]) -> list[Figure]:
    """Return the figures of acceptance by workload, category, drafter and K."""
    found: list[Figure] = []
    for row in rows:
        method = f"{row.drafter}, K={row.num_draft_tokens}"
        labels: dict[str, Any] = {"workload": row.workload, "category": row.category, "temperature": row.temperature}
        labels |= {"method": method, "drafter": row.drafter, "num_draft_tokens": row.num_draft_tokens}
        values = {"acceptance_length": row.mean_acceptance_length, "acceptance_rate": row.acceptance_rate}
        found += figures_of(labels, values, row.num_prompts)
        for position, share in enumerate(row.per_position, 1):
            found.append(Figure("position_acceptance", {**labels, "position": position}, share))
    return found


def quality_figures(rows: Sequence[QualityRow]) -> list[Figure]:
    """Return the figures of number formats. The interval of the loss is 1.96 standard errors wide to either side."""
    found: list[Figure] = []
    for row in rows:
        labels = {"workload": row.workload, "method": row.number_format}
        lost = Interval(row.lost, row.lost - 1.96 * row.lost_error, row.lost + 1.96 * row.lost_error)
        values: dict[str, Interval | float | None] = {
            "perplexity": row.perplexity,
            "perplexity_lost": lost,
            "divergence": row.divergence,
            "agreement": row.agreement,
        }
        found += figures_of(labels, values, row.tokens)
    return found
