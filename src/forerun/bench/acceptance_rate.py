"""Acceptance rate and mean acceptance length of drafters on workloads, at temperatures 0 and 1, without seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.bench.prompts import Request
from forerun.bench.report import Columns
from forerun.config import SamplingParams
from forerun.engine import LLM

TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class AcceptanceRow:
    """One drafter on all prompts of a workload together, at one temperature.

    Attributes:
        num_draft_tokens: K.
        acceptance_rate: accepted over drafted; 0 where nothing was drafted.
        mean_acceptance_length: tokens per target forward, bonus included.
    """

    workload: str
    drafter: str
    num_draft_tokens: int
    temperature: float
    acceptance_rate: float
    mean_acceptance_length: float


COLUMNS: Columns[AcceptanceRow] = {
    "workload, drafter": lambda row: f"{row.workload}, {row.drafter}",
    "K": lambda row: str(row.num_draft_tokens),
    "temperature": lambda row: f"{row.temperature:g}",
    "acceptance rate": lambda row: f"{row.acceptance_rate:.3f}",
    "mean acceptance length": lambda row: f"{row.mean_acceptance_length:.2f}",
}


def measure(
    engines: Mapping[tuple[str, int], LLM], workloads: Mapping[str, Sequence[Request]], max_tokens: int
) -> list[AcceptanceRow]:
    """Every drafter on every workload at TEMPERATURES. engines: by (drafter, K)."""
    rows = []
    for workload, requests in workloads.items():
        for (drafter, k), llm in engines.items():
            for temperature in TEMPERATURES:
                params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
                generations: Any = llm.generate([request.token_ids for request in requests], params)
                stats = [generation.stats for generation in generations]
                drafted = sum(each.num_draft_tokens for each in stats)
                rate = sum(each.num_accepted_tokens for each in stats) / drafted if drafted else 0.0
                length = sum(each.num_tokens for each in stats) / sum(each.num_forwards for each in stats)
                rows.append(AcceptanceRow(workload, drafter, k, temperature, rate, length))
    return rows
