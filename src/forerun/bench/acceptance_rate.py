"""Acceptance rate and mean acceptance length of drafters on workloads, without seeds; nothing is timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.bench.prompts import Request
from forerun.bench.report import Columns
from forerun.config import SamplingParams
from forerun.engine import LLM
from forerun.engine.stats import SequenceStats

TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class AcceptanceRow:
    """One drafter on all prompts of a workload, or of one of its categories, together, at one temperature.

    Attributes:
        num_draft_tokens: K.
        acceptance_rate: accepted over drafted; 0 where nothing was drafted.
        mean_acceptance_length: tokens per target forward, bonus included.
        category: of the prompts; empty for all of them.
        num_prompts: how many they are.
        per_position: chance that the token at each position of a draft is accepted where it was reached.
    """

    workload: str
    drafter: str
    num_draft_tokens: int
    temperature: float
    acceptance_rate: float
    mean_acceptance_length: float
    category: str = ""
    num_prompts: int = 0
    per_position: tuple[float, ...] = ()


COLUMNS: Columns[AcceptanceRow] = {
    "workload, drafter": lambda row: f"{row.workload}, {row.drafter}",
    "K": lambda row: str(row.num_draft_tokens),
    "temperature": lambda row: f"{row.temperature:g}",
    "acceptance rate": lambda row: f"{row.acceptance_rate:.3f}",
    "mean acceptance length": lambda row: f"{row.mean_acceptance_length:.2f}",
}
BY_CATEGORY: Columns[AcceptanceRow] = {
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
"""Positions that were reached less often are not told."""


def measure(
    engines: Mapping[tuple[str, int], LLM],
    workloads: Mapping[str, Sequence[Request]],
    max_tokens: int,
    temperatures: Sequence[float] = TEMPERATURES,
    *,
    by_category: bool = False,
    ignore_eos: bool = True,
) -> list[AcceptanceRow]:
    """Every drafter on every workload, its prompts at once. engines: by (drafter, K).

    by_category: a row for each category of a workload, too, where it has several.
    """
    rows = []
    for workload, requests in workloads.items():
        for (drafter, k), llm in engines.items():
            for temperature in temperatures:
                params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=ignore_eos)
                generations: Any = llm.generate([request.token_ids for request in requests], params)
                groups: dict[str, list[SequenceStats]] = {"": []}
                for request, generation in zip(requests, generations, strict=True):
                    groups[""].append(generation.stats)
                    if by_category and request.category:
                        groups.setdefault(request.category, []).append(generation.stats)
                if len(groups) == 2:
                    groups = {"": groups[""]}
                rows += [_row(workload, drafter, k, temperature, name, each) for name, each in groups.items()]
    return rows


def _row(
    workload: str, drafter: str, k: int, temperature: float, category: str, stats: Sequence[SequenceStats]
) -> AcceptanceRow:
    drafted = sum(each.num_draft_tokens for each in stats)
    depth = max((len(each.reached_per_position) for each in stats), default=0)
    reached, accepted = [0] * depth, [0] * depth
    for each in stats:
        for place, (tried, kept) in enumerate(zip(each.reached_per_position, each.accepted_per_position, strict=True)):
            reached[place] += tried
            accepted[place] += kept
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
