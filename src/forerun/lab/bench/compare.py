"""Runs of several methods on the same prompts, and their reduction to one row per method."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from forerun.lab.bench.measure import Interval, Timed, bootstrap, quantile, ratio

PLAIN = "forerun, plain"
HF_PLAIN = "transformers, plain"
_ASSISTED = "transformers, assisted"


@dataclass(frozen=True, slots=True)
class MethodRun:
    """One generation of one method.

    Attributes:
        token_ids: the tokens generated.
        num_forwards: target forwards that yielded tokens; 0 where unknown (a method that is not ours).
        num_drafted: draft tokens proposed.
        num_accepted: draft tokens accepted.
        first_seconds: until the first token came; None where unknown.
        reached: [position] drafts that had a token there below what was accepted before it; empty where unknown.
        accepted: [position] how many of those tokens were accepted.
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
    time_target: float = field(default=0.0, compare=False)
    time_draft: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class MethodRow:
    """One method. Ratios are above 1 where this method is faster; they are over the same prompts and rounds.

    Attributes:
        method: its name.
        tokens_per_second: median.
        over_plain: speed over forerun's plain decoding.
        over_transformers: speed over Transformers' plain generate.
        over_assisted: speed over Transformers' assisted generation at its best K; None without a draft model.
        mean_acceptance_length: tokens per target forward; None where unknown.
        acceptance_rate: accepted over drafted; None where nothing was drafted or it is unknown.
        first_token: median seconds to the first token; None where unknown.
        first_token_p90: nine tenths of the first tokens came within so many seconds; None where unknown.
        acceptance_per_position: [position] accepted over drafted there, below what was accepted before it.
        same_text: share of prompts on which its tokens are those of forerun's plain decoding.
        num_runs: how many generations are behind it.
        step: median milliseconds of a step, of the target's forwards in it, and of the drafter's work; empty where
            unknown.
    """

    method: str
    tokens_per_second: Interval
    over_plain: Interval
    over_transformers: Interval | None
    over_assisted: Interval | None
    mean_acceptance_length: float | None
    acceptance_rate: float | None
    first_token: float | None
    first_token_p90: float | None
    acceptance_per_position: Sequence[float]
    same_text: float
    num_runs: int = 0
    step: Sequence[float] = ()


def assisted_name(k: int) -> str:
    """Return the name of Transformers' assisted generation with K draft tokens."""
    return f"{_ASSISTED}, K={k}"


def reduce_runs(runs: Mapping[str, Sequence[Timed[MethodRun]]], plain: str = PLAIN) -> list[MethodRow]:
    """Reduce runs to one row per method, in the order given.

    Speed is compared per token, so that a method that stops early does not look fast.

    Args:
        runs: by method; run i of every method is of the same prompt and round.
        plain: the method that the others are compared with.
    """
    per_token = {
        name: [run.seconds / max(1, len(run.value.token_ids)) for run in timed] for name, timed in runs.items()
    }
    assisted = [name for name in per_token if name.startswith(_ASSISTED)]
    best = min(assisted, key=lambda name: statistics.median(per_token[name]), default=None)
    rows = []
    for name, timed in runs.items():
        forwards = sum(run.value.num_forwards for run in timed)
        drafted = sum(run.value.num_drafted for run in timed)
        first = [run.value.first_seconds for run in timed if run.value.first_seconds is not None]
        rows.append(
            MethodRow(
                name,
                tokens_per_second=bootstrap([1 / seconds for seconds in per_token[name]]),
                over_plain=ratio(per_token[plain], per_token[name]),
                over_transformers=ratio(per_token[HF_PLAIN], per_token[name]) if HF_PLAIN in per_token else None,
                over_assisted=ratio(per_token[best], per_token[name]) if best else None,
                mean_acceptance_length=sum(len(run.value.token_ids) for run in timed) / forwards if forwards else None,
                acceptance_rate=sum(run.value.num_accepted for run in timed) / drafted if drafted else None,
                first_token=statistics.median(first) if first else None,
                first_token_p90=quantile(first, 0.9) if first else None,
                acceptance_per_position=_per_position([run.value for run in timed]),
                same_text=statistics.fmean(
                    list(a.value.token_ids) == list(b.value.token_ids) for a, b in zip(timed, runs[plain], strict=True)
                ),
                num_runs=len(timed),
                step=_step(timed),
            )
        )
    return rows


def _per_position(runs: Sequence[MethodRun]) -> list[float]:
    """Return accepted over reached, up to the last position that any draft reached."""
    counts = [
        [sum(position) for position in zip_longest(*(getattr(run, name) for run in runs), fillvalue=0)]
        for name in ("reached", "accepted")
    ]
    return [accepted / reached for reached, accepted in zip(*counts, strict=True) if reached]


def _step(timed: Sequence[Timed[MethodRun]]) -> list[float]:
    """Return the times of `MethodRow.step`."""
    parts = [
        [1e3 * part / run.value.num_forwards for part in (run.seconds, run.value.time_target, run.value.time_draft)]
        for run in timed
        if run.value.time_target
    ]
    return [statistics.median(part) for part in zip(*parts, strict=True)]
