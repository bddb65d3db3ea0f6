"""From timed runs of several methods on the same prompts to one row per method, measured against the first."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forerun.lab.bench.measure import Interval, Timed, ratio


@dataclass(frozen=True, slots=True)
class MethodRun:
    """What one method made of one prompt.

    Attributes:
        token_ids: the tokens generated.
        num_forwards: target forwards that yielded tokens; 0 where unknown (a method that is not ours).
        num_drafted: draft tokens proposed.
        num_accepted: draft tokens accepted.
        first_seconds: until the first token came; None where unknown.
        reached: [position] drafts that had a token there below what was accepted before it; empty where unknown.
        accepted: [position] how many of those tokens were accepted.
        gaps: seconds between tokens; empty where unknown.
        time_target: of its seconds, in the target's forwards; 0 where unknown.
        time_draft: of its seconds, in the drafter.
    """

    token_ids: Sequence[int]
    num_forwards: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    first_seconds: float | None = field(default=None, compare=False)
    reached: Sequence[int] = ()
    accepted: Sequence[int] = ()
    gaps: Sequence[float] = field(default=(), compare=False)
    time_target: float = field(default=0.0, compare=False)
    time_draft: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Row:
    """One method against the reference.

    Attributes:
        method: its name.
        tokens_per_second: median over its runs.
        speedup: median of the ratios to the reference in the same round, with its interval.
        mean_acceptance_length: tokens per target forward, bonus included; None where unknown.
        acceptance_rate: accepted over drafted; None where nothing was drafted.
        identical: every run gave the reference's tokens.
    """

    method: str
    tokens_per_second: float
    speedup: Interval
    mean_acceptance_length: float | None
    acceptance_rate: float | None
    identical: bool


def compare(runs: Mapping[str, Sequence[Timed[MethodRun]]], reference: str) -> list[Row]:
    """One row per method, in the order given. Run i of every method is of the same prompt and round.

    Speed is compared per token, so that a method that stops early does not look fast.
    """
    base = runs[reference]
    rows = []
    for method, timed in runs.items():
        forwards = sum(run.value.num_forwards for run in timed)
        drafted = sum(run.value.num_drafted for run in timed)
        rows.append(
            Row(
                method,
                statistics.median(1 / _per_token(run) for run in timed),
                ratio([_per_token(run) for run in base], [_per_token(run) for run in timed]),
                sum(len(run.value.token_ids) for run in timed) / forwards if forwards else None,
                sum(run.value.num_accepted for run in timed) / drafted if drafted else None,
                all(list(a.value.token_ids) == list(b.value.token_ids) for a, b in zip(timed, base, strict=True)),
            )
        )
    return rows


def _per_token(run: Timed[MethodRun]) -> float:
    return run.seconds / max(1, len(run.value.token_ids))
