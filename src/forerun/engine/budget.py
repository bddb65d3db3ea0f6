"""How many tokens may be drafted in the next step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from forerun.types import Draft, Sequence, Verdict


@dataclass(frozen=True, slots=True)
class Plan:
    """What the drafter may propose in one step.

    Attributes:
        budgets: nodes of each sequence's draft at most.
        price: see `Drafter.draft`.
    """

    budgets: list[int]
    price: float = 0.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one step cost. Times in seconds.

    Attributes:
        num_rows: rows of the target's forward, prompt chunks included.
        num_prompt_rows: of these, rows of prompt chunks.
        num_sequences: sequences whose drafts were verified.
        context: positions in their caches, summed.
        budgets: what they were given.
        time_draft: in the drafter's `draft`; 0 where it was not called.
        time_target: in the target's forward.
        time_verify: from logits to verdicts.
    """

    num_rows: int
    num_prompt_rows: int
    num_sequences: int
    context: int
    budgets: Seq[int]
    time_draft: float
    time_target: float
    time_verify: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one sequence's draft.

    Attributes:
        sequence: whose.
        budget: what it was given.
        draft: what came.
        verdict: before it was cut where the output ends.
    """

    sequence: Sequence
    budget: int
    draft: Draft
    verdict: Verdict


class Budget(Protocol):
    """Decides, and learns from what came of it."""

    def plan(self, sequences: Seq[Sequence]) -> Plan:
        """For the sequences whose prompts are computed, before they draft."""

    def observe(self, cost: StepCost, outcomes: Seq[Outcome]) -> None:
        """A step has been computed and verified."""

    def stop(self, sequence: Sequence) -> None:
        """The sequence leaves."""


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
