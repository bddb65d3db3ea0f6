"""The contract of a budget: what it says before a step, and what it is told after it. And the simplest budget."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from forerun.types import Draft, Sequence, Verdict

Reason = Literal["fixed", "gain", "no gain", "full batch", "prompts", "no room", "measuring", "probe", "request"]
"""Why a plan drafts or does not: K was given; drafting gives more tokens per second; it does not; it would for one
sequence alone, but not in this batch; the step computes prompts besides; no sequence may grow by a draft; costs are not
measured yet; other budgets than the best are tried; the request wants none."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the drafter may propose in one step.

    Attributes:
        budgets: nodes of each sequence's draft at most.
        price: see `Drafter.draft`.
        reason: why so many.
    """

    budgets: list[int]
    price: float = 0.0
    reason: Reason = "fixed"


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one step cost. Times in seconds.

    Attributes:
        num_rows: rows of the target's forward, prompt chunks included.
        num_prompt_rows: of these, rows of prompt chunks.
        context: positions in the sequences' caches, summed.
        time_draft: in the drafter, drafting and learning what became of the draft.
        time_target: in the target's forward.
        time_verify: from logits to verdicts.
        time_rest: the engine's other work: committing, text, statistics.
    """

    num_rows: int
    num_prompt_rows: int
    context: int
    time_draft: float
    time_target: float
    time_verify: float
    time_rest: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.time_draft + self.time_target + self.time_verify + self.time_rest


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one sequence's draft.

    Attributes:
        sequence: it already holds the new tokens.
        budget: the budget that the plan gave it.
        draft: what the drafter proposed.
        verdict: before it was cut where the output ends.
    """

    sequence: Sequence
    budget: int
    draft: Draft
    verdict: Verdict


class Budget(ABC):
    """Decides how many nodes may be drafted, and learns from what came of it."""

    @abstractmethod
    def plan(self, sequences: Seq[Sequence]) -> Plan:
        """Budgets for the sequences whose prompts are computed, before they draft."""

    def beside_prompts(self, sequences: Seq[Sequence]) -> Plan:
        """As `plan`, in a step that computes prompts of others, too: nothing is drafted.

        Such a step holds so many rows that a further one costs its whole arithmetic, which an accepted token is seldom
        worth, since the same rows would be one token each in plain decoding.
        """
        return Plan([0] * len(sequences), reason="prompts")

    def observe(self, cost: StepCost, outcomes: Seq[Outcome]) -> None:  # noqa: B027 - a budget need not learn
        """A step is done. `stop` has not yet been called for the sequences that end with it."""

    def stop(self, sequence: Sequence) -> None:  # noqa: B027 - nor keep anything of a sequence
        """The sequence leaves."""


class FixedBudget(Budget):
    """The same K for every sequence in every step."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens

    def plan(self, sequences: Seq[Sequence]) -> Plan:
        budgets = [self.num_draft_tokens if sequence.room > 0 else 0 for sequence in sequences]
        return Plan(budgets, reason="no room" if self.num_draft_tokens and not any(budgets) else "fixed")

    def beside_prompts(self, sequences: Seq[Sequence]) -> Plan:
        return self.plan(sequences)
