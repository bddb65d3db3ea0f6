"""Figures of speculation in a response: `metrics.speculative_decoding`, by vLLM's names, and the decisions."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from forerun.engine.stats import SequenceStats


def speculation_metrics(every: Iterable[SequenceStats]) -> dict[str, Any]:
    """Return the figures of all choices of a response together.

    `mean_acceptance_length` is tokens per speculative step, bonus token included. `acceptance_histogram` has at index i
    the speculative steps in which i draft tokens were accepted. `num_spec_tokens` is the deepest draft. `decisions` are
    counts of steps by decision and reason; `sources` are drafted and accepted tokens by drafter.
    """
    stats = list(every)
    reached = _summed([each.reached_per_position for each in stats])
    accepted = _summed([each.accepted_per_position for each in stats])
    steps = reached[0] if reached else 0
    drafted, kept = sum(each.num_draft_tokens for each in stats), sum(each.num_accepted_tokens for each in stats)
    at_least = [steps, *accepted, 0]
    return {
        "mean_acceptance_length": 1 + kept / steps if steps else 1.0,
        "draft_acceptance_rate": kept / drafted if drafted else 0.0,
        "acceptance_histogram": [more - most for more, most in pairwise(at_least)],
        "num_spec_steps": steps,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": kept,
        "num_spec_tokens": len(reached),
        "num_forwards": sum(each.num_forwards for each in stats),
        "decisions": _counted(each.decisions for each in stats),
        "sources": _sources(stats),
        "seconds": {
            "draft": sum(each.time_draft for each in stats),
            "target": sum(each.time_target for each in stats),
            "verify": sum(each.time_verify for each in stats),
            "total": max((each.time_total for each in stats), default=0.0),
        },
    }


def _summed(rows: list[list[int]]) -> list[int]:
    """Sum lists of different lengths by position."""
    length = max(map(len, rows), default=0)
    return [sum(row[position] for row in rows if position < len(row)) for position in range(length)]


def _counted(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            found[name] = found.get(name, 0) + count
    return found


def _sources(stats: list[SequenceStats]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for each in stats:
        for name, source in each.sources.items():
            sums = found.setdefault(name, {"num_draft_tokens": 0, "num_accepted_tokens": 0})
            sums["num_draft_tokens"] += source.num_draft_tokens
            sums["num_accepted_tokens"] += source.num_accepted_tokens
    return found
