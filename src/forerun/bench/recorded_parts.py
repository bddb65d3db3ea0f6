"""The figures of forwards, of acceptance and of number formats, in the schema of results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.bench.acceptance_rate import AcceptanceRow
from forerun.bench.forward import ForwardRow
from forerun.bench.measure import Interval
from forerun.bench.quality import QualityRow
from forerun.bench.recorded import figures_of
from forerun.bench.roofline import Roof
from forerun.results import Figure

ROOFLINE = "roofline"
"""As a method."""


def forward_figures(rows: Sequence[ForwardRow], prefix: int, rounds: int, roof: Roof) -> list[Figure]:
    """Times of forwards, and the roofline beside them."""
    found: list[Figure] = []
    for row in rows:
        for k, milliseconds in row.milliseconds.items():
            labels: dict[str, Any] = {"dtype": row.dtype, "method": row.method, "rows": k, "prefix": prefix}
            values = {
                "forward": _seconds(milliseconds),
                "forward_over_transformers": row.ratios.get(k),
                "forward_growth": row.growth.get(k),
            }
            found += figures_of(labels, values, rounds)
    for row in {row.dtype: row for row in rows}.values():
        for k in row.milliseconds:
            labels = {"dtype": row.dtype, "method": ROOFLINE, "rows": k, "prefix": prefix}
            found += figures_of(labels, {ROOFLINE: roof.seconds(row.parameters, row.dtype, k)})
    return found


def acceptance_figures(rows: Sequence[AcceptanceRow]) -> list[Figure]:
    """Acceptance by workload, category, drafter and K."""
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
    """What the formats cost. The interval of what is lost is two standard errors wide to either side."""
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


def _seconds(milliseconds: Interval) -> Interval:
    low, high = (None if each is None else each / 1e3 for each in (milliseconds.low, milliseconds.high))
    return Interval(milliseconds.median / 1e3, low, high)
