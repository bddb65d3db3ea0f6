"""How many draft tokens a sequence may have in the next step."""

from __future__ import annotations

from forerun.types import Sequence


def draft_budget(sequence: Sequence, num_draft_tokens: int) -> int:
    """At most K, and never beyond max_length: a step appends one token more than it accepts."""
    return min(num_draft_tokens, sequence.max_length - len(sequence.token_ids) - 1)
