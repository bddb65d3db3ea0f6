"""The budget that gives every sequence the same K."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forerun.policy.budget import Outcome, Plan, StepCost
from forerun.types import Sequence


class FixedBudget:
    """The same K for every sequence in every step."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens

    def plan(self, sequences: Seq[Sequence]) -> Plan:
        return Plan([self.num_draft_tokens if sequence.room > 0 else 0 for sequence in sequences])

    def observe(self, cost: StepCost, outcomes: Seq[Outcome]) -> None:
        pass

    def stop(self, sequence: Sequence) -> None:
        pass
