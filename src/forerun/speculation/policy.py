"""The interface of policies that decide how much is drafted, the policy of a fixed K, and that of several drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from forerun.types import Draft, Sequence, Verdict

Reason = Literal[
    "fixed",
    "gain",
    "no gain",
    "full batch",
    "prompts",
    "no room",
    "measuring",
    "probe",
    "request",
    "nothing found",
    "no drafter",
]
"""Why a sequence drafts or does not: K was given; drafting gives more tokens per second; it does not; it would for one
sequence alone, but not in this batch; the step computes prompts; the sequence cannot grow by a draft; costs are not
measured yet; other values of K than the best are tried; the request allows none; the drafter proposed
nothing; there is none."""


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The number of draft tokens of one step.

    Attributes:
        num_draft_tokens: nodes of each sequence's draft at most.
        min_acceptance_prob: see `Drafter.draft`.
        reason: why this many: of those that draft, or where none does of most.
        prices: seconds of the step by the rows that drafts add, for `Drafter.see_prices`; None: the number is fixed.
        own_reasons: of sequences for which it is another, by their index.
    """

    num_draft_tokens: list[int]
    min_acceptance_prob: float = 0.0
    reason: Reason = "fixed"
    prices: Seq[float] | None = None
    own_reasons: Mapping[int, Reason] = field(default_factory=dict)

    def reason_of(self, index: int) -> Reason:
        """Return why the sequence of this index drafts so much, or nothing."""
        return self.own_reasons.get(index, self.reason)


def own_reasons(sequences: Seq[Sequence], num_draft_tokens: Seq[int], reason: Reason) -> dict[int, Reason]:
    """Return by index why sequences draft nothing: for want of room, or for this reason."""
    pairs = zip(sequences, num_draft_tokens, strict=True)
    return {i: "no room" if sequence.room <= 0 else reason for i, (sequence, k) in enumerate(pairs) if not k}


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
        num_experts: that the forward read, in all layers.
        experts_given: `LanguageModel.experts_given`; None where it read none.
        is_after_prompt: the step before had prompt chunks, after which rows may cost twice as much for once.
    """

    num_rows: int
    num_prompt_rows: int
    context: int
    time_draft: float
    time_target: float
    time_verify: float
    time_rest: float = 0.0
    num_experts: int = 0
    experts_given: Callable[[], NDArray[np.int64] | None] | None = None
    is_after_prompt: bool = False

    @property
    def seconds(self) -> float:
        """Return the whole time of the step."""
        return self.time_draft + self.time_target + self.time_verify + self.time_rest


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """The verdict on one sequence's draft.

    Attributes:
        sequence: it already holds the new tokens.
        num_draft_tokens: nodes that the plan gave it.
        draft: what the drafter proposed.
        verdict: before it was cut where the output ends.
    """

    sequence: Sequence
    num_draft_tokens: int
    draft: Draft
    verdict: Verdict


class SpeculationPolicy(ABC):
    """Decides how many nodes may be drafted, and learns from the outcomes."""

    @abstractmethod
    def plan(self, sequences: Seq[Sequence]) -> DraftPlan:
        """Plan the drafts of sequences whose prompts are computed."""

    def beside_prompts(self, sequences: Seq[Sequence]) -> DraftPlan:
        """Plan a step that also computes prompts of other sequences: nothing is drafted.

        Such a step holds so many rows that a further one costs its whole arithmetic, which an accepted token is seldom
        worth, since the same rows would be one token each in plain decoding.
        """
        return DraftPlan([0] * len(sequences), reason="prompts")

    @property
    def is_asleep(self) -> bool:
        """Return whether the drafter need not be told of the present step."""
        return False

    @property
    def rests(self) -> bool:
        """Return whether `rest` is to be told of the present step in place of `observe`, as nothing is drafted."""
        return False

    def rest(self, seconds: float) -> None:  # noqa: B027 - a policy need not know
        """Let a step of so many seconds pass."""

    def trim(self, plan: DraftPlan, sequences: Seq[Sequence], drafts: Seq[Draft]) -> DraftPlan:
        """Return the plan once the drafts are made: of each draft, the first nodes are kept, as many as it says now."""
        return plan

    def observe(self, cost: StepCost, outcomes: Seq[DraftOutcome]) -> None:  # noqa: B027 - a policy need not learn
        """Learn from a step. `stop` has not yet been called for the sequences that end with it."""

    def stop(self, sequence: Sequence) -> None:  # noqa: B027 - nor keep anything of a sequence
        """Forget a sequence that leaves."""


class FixedPolicy(SpeculationPolicy):
    """The same K for every sequence in every step."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens

    def plan(self, sequences: Seq[Sequence]) -> DraftPlan:
        if not self.num_draft_tokens:
            return DraftPlan([0] * len(sequences))
        num_draft_tokens = [self.num_draft_tokens if sequence.room > 0 else 0 for sequence in sequences]
        own = own_reasons(sequences, num_draft_tokens, "no room")
        return DraftPlan(num_draft_tokens, reason="fixed" if any(num_draft_tokens) else "no room", own_reasons=own)

    def beside_prompts(self, sequences: Seq[Sequence]) -> DraftPlan:
        return self.plan(sequences)


class PolicyByRequest(SpeculationPolicy):
    """Applies, for each sequence, the policy of its drafter.

    While all sequences that draft have one drafter, its policy sees every sequence of the step, and learns as if there
    were no other. In a step with several drafters, each policy plans for its own sequences, and learns acceptance, but
    not the costs of the step, which cannot be attributed.

    Args:
        policies: by the drafters' names.
        chosen: the name of a sequence's drafter; None where it has none.
    """

    def __init__(self, policies: Mapping[str, SpeculationPolicy], chosen: Callable[[Sequence], str | None]) -> None:
        self._policies = dict(policies)
        self._chosen = chosen
        self._plans: dict[str, DraftPlan] = {}  # of the present step

    def plan(self, sequences: Seq[Sequence]) -> DraftPlan:
        return self._combined(sequences, lambda policy, part: policy.plan(part))

    @property
    def is_asleep(self) -> bool:
        return all(policy.is_asleep for policy in self._policies.values())

    @property
    def rests(self) -> bool:
        return all(policy.rests for policy in self._policies.values())

    def rest(self, seconds: float) -> None:
        for policy in self._policies.values():
            policy.rest(seconds)

    def beside_prompts(self, sequences: Seq[Sequence]) -> DraftPlan:
        return self._combined(sequences, lambda policy, part: policy.beside_prompts(part))

    def _combined(
        self, sequences: Seq[Sequence], plan_of: Callable[[SpeculationPolicy, Seq[Sequence]], DraftPlan]
    ) -> DraftPlan:
        """Combine the plans of all policies."""
        groups = self._groups(sequences)
        if not groups:
            return DraftPlan([0] * len(sequences), reason="request")
        reasons: dict[int, Reason] = dict.fromkeys(range(len(sequences)), "request")
        if len(groups) == 1:
            (name,) = groups
            plan = self._plans[name] = plan_of(self._policies[name], sequences)
            if len(groups[name]) == len(sequences):
                return plan
            own = set(groups[name])
            counts = [k if i in own else 0 for i, k in enumerate(plan.num_draft_tokens)]
            reasons |= {i: plan.reason_of(i) for i in own}
            return replace(plan, num_draft_tokens=counts, own_reasons=reasons)
        num_draft_tokens = [0] * len(sequences)
        plans = []
        for name, indices in groups.items():
            self._plans[name] = plan_of(self._policies[name], [sequences[index] for index in indices])
            plans.append(self._plans[name])
            for place, index in enumerate(indices):
                num_draft_tokens[index] = plans[-1].num_draft_tokens[place]
                reasons[index] = plans[-1].reason_of(place)
        drafting = [plan for plan in plans if any(plan.num_draft_tokens)] or plans
        least = min(plan.min_acceptance_prob for plan in drafting)
        return DraftPlan(num_draft_tokens, least, drafting[0].reason, drafting[0].prices, reasons)

    def trim(self, plan: DraftPlan, sequences: Seq[Sequence], drafts: Seq[Draft]) -> DraftPlan:
        num_draft_tokens = list(plan.num_draft_tokens)
        reason = plan.reason
        reasons = dict(plan.own_reasons)
        for name, indices in self._groups(sequences).items():
            counts = [plan.num_draft_tokens[index] for index in indices]
            own = {place: plan.reason_of(index) for place, index in enumerate(indices)}
            part = replace(self._plans[name], num_draft_tokens=counts, own_reasons=own)
            part = self._policies[name].trim(part, [sequences[i] for i in indices], [drafts[i] for i in indices])
            reason = part.reason
            for place, index in enumerate(indices):
                num_draft_tokens[index] = part.num_draft_tokens[place]
                reasons[index] = part.reason_of(place)
        reason = plan.reason if any(num_draft_tokens) else reason
        return replace(plan, num_draft_tokens=num_draft_tokens, reason=reason, own_reasons=reasons)

    def observe(self, cost: StepCost, outcomes: Seq[DraftOutcome]) -> None:
        groups = self._groups([outcome.sequence for outcome in outcomes])
        if len(groups) == 1:
            (name,) = groups
            self._policies[name].observe(cost, outcomes)
            return
        # rows that are no drafts' hide what a step costs, and so do those of other drafters
        hidden = replace(cost, num_prompt_rows=max(cost.num_prompt_rows, 1), time_draft=0.0)
        for name, indices in groups.items():
            self._policies[name].observe(hidden, [outcomes[index] for index in indices])

    def stop(self, sequence: Sequence) -> None:
        for policy in self._policies.values():
            policy.stop(sequence)

    def _groups(self, sequences: Seq[Sequence]) -> dict[str, list[int]]:
        """Return drafter's name -> indices of its sequences."""
        groups: dict[str, list[int]] = {}
        for index, sequence in enumerate(sequences):
            name = self._chosen(sequence)
            if name is not None:
                groups.setdefault(name, []).append(index)
        return groups
