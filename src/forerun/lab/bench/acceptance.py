"""Acceptance rate and mean acceptance length of drafters on workloads, without seeds; nothing is timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import Any

from forerun.config import SamplingParams
from forerun.engine import LLM
from forerun.engine.results import SequenceStats
from forerun.lab.bench.prompts import BenchPrompt
from forerun.lab.bench.tables import Columns


@dataclass(frozen=True, slots=True)
class AcceptanceRow:
    """One drafter on all prompts of a workload, or of one of its categories, together, at one temperature.

    Attributes:
        num_draft_tokens: K.
        acceptance_rate: accepted over drafted; 0 where nothing was drafted.
        mean_acceptance_length: tokens per target forward, bonus included.
        category: of the prompts; empty for all of them.
        num_prompts: how many they are.
        per_position: probability that the token at each position of a draft is accepted where it was reached.
    """

    workload: str
    drafter: str
    num_draft_tokens: int
    temperature: float
    acceptance_rate: float
    mean_acceptance_length: float
    category: str
    num_prompts: int
    per_position: tuple[float, ...]


COLUMNS: Columns[AcceptanceRow] = {
    "category": lambda row: row.category or "all",
    "prompts": lambda row: str(row.num_prompts),
    "drafter": lambda row: row.drafter,
    "K": lambda row: str(row.num_draft_tokens),
    "temperature": lambda row: f"{row.temperature:g}",
    "mean acceptance length": lambda row: f"{row.mean_acceptance_length:.2f}",
    "acceptance rate": lambda row: f"{row.acceptance_rate:.3f}",
    "by position": lambda row: " ".join(f"{share:.2f}".lstrip("0") for share in row.per_position),
}
_MIN_REACHED = 20
"""Positions that were reached less often are left out."""


def measure_acceptance(
    llm: LLM,
    drafter: str,
    k: int,
    workloads: Mapping[str, Sequence[BenchPrompt]],
    max_tokens: int,
    temperatures: Sequence[float],
) -> list[AcceptanceRow]:
    """Measure a drafter on every workload, all prompts at once, and on each category where there are several.

    llm: with the drafter, at K = `k`.
    """
    rows = []
    for (workload, requests), temperature in product(workloads.items(), temperatures):
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        generations: Any = llm.generate([request.token_ids for request in requests], params)
        groups: dict[str, list[SequenceStats]] = {"": [generation.stats for generation in generations]}
        for request, generation in zip(requests, generations, strict=True):
            if request.category:
                groups.setdefault(request.category, []).append(generation.stats)
        if len(groups) == 2:
            groups = {"": groups[""]}
        rows += [_row(workload, drafter, k, temperature, name, each) for name, each in groups.items()]
    return rows


def _row(
    workload: str, drafter: str, k: int, temperature: float, category: str, stats: Sequence[SequenceStats]
) -> AcceptanceRow:
    drafted = sum(each.num_draft_tokens for each in stats)
    reached, accepted = (
        [sum(position) for position in zip_longest(*(getattr(each, name) for each in stats), fillvalue=0)]
        for name in ("reached_per_position", "accepted_per_position")
    )
    return AcceptanceRow(
        workload,
        drafter,
        k,
        temperature,
        sum(each.num_accepted_tokens for each in stats) / drafted if drafted else 0.0,
        sum(each.num_tokens for each in stats) / sum(each.num_forwards for each in stats),
        category,
        len(stats),
        tuple(kept / tried for tried, kept in zip(reached, accepted, strict=True) if tried >= _MIN_REACHED),
    )
