"""Figures of speculation in a response: `metrics.speculative_decoding`, by vLLM's names, and the decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise, zip_longest
from typing import Any

from forerun.engine.stats import SequenceStats


def speculation_metrics(every: Iterable[SequenceStats]) -> dict[str, Any]:
    """Return the figures of all choices of a response together.

    `mean_acceptance_length` is tokens per speculative step, bonus token included. `acceptance_histogram` has at index i
    the speculative steps in which i draft tokens were accepted. `num_spec_tokens` is the deepest draft. `decisions` are
    counts of steps by decision and reason; `sources` are drafted and accepted tokens by drafter.
    """
    stats = list(every)
    reached = [sum(row) for row in zip_longest(*(each.reached_per_position for each in stats), fillvalue=0)]
    accepted = [sum(row) for row in zip_longest(*(each.accepted_per_position for each in stats), fillvalue=0)]
    steps = reached[0] if reached else 0
    drafted, kept = sum(each.num_draft_tokens for each in stats), sum(each.num_accepted_tokens for each in stats)
    decisions, of_sources = Counter[str](), dict[str, Counter[str]]()
    for each in stats:
        decisions.update(each.decisions)
        for name, source in each.sources.items():
            counts = {"num_draft_tokens": source.num_draft_tokens, "num_accepted_tokens": source.num_accepted_tokens}
            of_sources.setdefault(name, Counter()).update(counts)
    return {
        "mean_acceptance_length": 1 + kept / steps if steps else 1.0,
        "draft_acceptance_rate": kept / drafted if drafted else 0.0,
        "acceptance_histogram": [more - most for more, most in pairwise([steps, *accepted, 0])],
        "num_spec_steps": steps,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": kept,
        "num_spec_tokens": len(reached),
        "num_forwards": sum(each.num_forwards for each in stats),
        "decisions": decisions,
        "sources": of_sources,
        "seconds": {
            "draft": sum(each.time_draft for each in stats),
            "target": sum(each.time_target for each in stats),
            "verify": sum(each.time_verify for each in stats),
            "total": max((each.time_total for each in stats), default=0.0),
        },
    }
