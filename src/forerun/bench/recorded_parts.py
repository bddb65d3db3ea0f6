"""The figures of forwards, of many requests at once and of number formats, in the schema of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forerun.bench.acceptance_rate import AcceptanceRow
from forerun.bench.forward import ForwardRow, Load
from forerun.bench.load.arrival import ArrivalRow
from forerun.bench.load.batches import BatchRow
from forerun.bench.load.loop import LoopRow
from forerun.bench.load.many import ManyRow
from forerun.bench.load.prefix import PrefixRow
from forerun.bench.load.replay import ReplayRow
from forerun.bench.measure import Interval
from forerun.bench.quality import QualityRow
from forerun.bench.recorded import figures_of
from forerun.bench.roofline import Roof
from forerun.results import Figure

ROOFLINE = "roofline"
"""As a method."""


def forward_figures(rows: Sequence[ForwardRow], load: Load, rounds: int, roof: Roof) -> list[Figure]:
    """Times of forwards, and the roofline beside them."""
    counted = "sequences" if load.by_sequence else "rows"
    found: list[Figure] = []
    for row in rows:
        for k in load.counts:
            labels: dict[str, Any] = {"dtype": row.dtype, "method": row.method, counted: k, "prefix": load.prefix}
            values = {
                "forward": _seconds(row.milliseconds[k]),
                "forward_over_transformers": row.ratios.get(k),
                "forward_growth": row.growth.get(k),
            }
            found += figures_of(labels, values, rounds)
    for dtype, parameters in {row.dtype: row.parameters for row in rows}.items():
        for k in load.counts:
            labels = {"dtype": dtype, "method": ROOFLINE, counted: k, "prefix": load.prefix}
            found += figures_of(labels, {ROOFLINE: roof.seconds(parameters, dtype, k)})
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


def load_figures(part: str, measured: Any, pairs: int, rounds: int) -> list[Figure]:
    """Of one part of `forerun bench load`: its rows, as it returns them."""
    rows = measured if isinstance(measured, list) else measured["rows"]
    found: list[Figure] = []
    for row in rows:
        labels, values, samples = _LOAD[type(row)](row)
        found += figures_of({"part": part, **labels}, values, {"pairs": pairs, "rounds": rounds}.get(samples))
    return found


_Made = tuple[dict[str, str | int], dict[str, Interval | float | None], str]


def _loop(row: LoopRow) -> _Made:
    return (
        {"outstanding": row.outstanding, "method": row.method},
        {
            "tokens_per_second": row.speed,
            "over_plain": None if row.method == "plain" else row.over_plain,
            "first_token": row.first_token / 1e3,
            "first_token_p90": row.first_token_p90 / 1e3,
            "between_tokens": row.between / 1e3,
            "wait_p99": row.wait_p99 / 1e3,
            "over_generate": row.over_generate,
        },
        "pairs",
    )


def _batch(row: BatchRow) -> _Made:
    values: dict[str, Interval | float | None] = {
        "tokens_per_second": row.speed,
        "over_first": row.over_one,
        "step": row.step / 1e3,
    }
    return {"batch": row.batch, "method": "plain"}, {**values, "outside_forwards": row.outside}, "rounds"


def _prefix(row: PrefixRow) -> _Made:
    return {"prefix": row.prefix}, {"first_token": _seconds(row.repeated)}, "rounds"


def _arrival(row: ArrivalRow) -> _Made:
    labels: dict[str, str | int] = {"streams": row.streams, "prompt_tokens": row.prompt}
    return labels, {"between_tokens": row.median / 1e3, "p99_over_median": row.p99_over_median}, "rounds"


def _many(row: ManyRow) -> _Made:
    return {"method": row.method}, {"tokens_per_second": row.speed}, "rounds"


def _replay(row: ReplayRow) -> _Made:
    labels: dict[str, str | int] = {"outstanding": row.outstanding, "method": f"auto, {row.drafter}"}
    return labels, {"over_plain": row.auto / row.plain}, "replay"


_LOAD: Mapping[type, Callable[[Any], _Made]] = {
    LoopRow: _loop,
    BatchRow: _batch,
    PrefixRow: _prefix,
    ArrivalRow: _arrival,
    ManyRow: _many,
    ReplayRow: _replay,
}


def _seconds(milliseconds: Interval) -> Interval:
    low, high = (None if each is None else each / 1e3 for each in (milliseconds.low, milliseconds.high))
    return Interval(milliseconds.median / 1e3, low, high)
