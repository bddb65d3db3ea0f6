"""The budget of an engine with several drafters, of which each request has one: a budget for each drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import replace

from forerun.policy.budget import Budget, Outcome, Plan, StepCost
from forerun.types import Sequence


class BudgetByRequest(Budget):
    """Asks, for each sequence, the budget of its drafter.

    While all sequences that draft have one drafter, its budget sees every sequence of the step, and learns as if there
    were no other. In a step with several drafters, each budget plans for its own sequences, and learns acceptance, but
    not what a step costs: that cannot be told apart.

    Args:
        budgets: by the drafters' names.
        chosen: the name of a sequence's drafter; None where it has none.
    """

    def __init__(self, budgets: Mapping[str, Budget], chosen: Callable[[Sequence], str | None]) -> None:
        self._budgets, self._chosen = dict(budgets), chosen

    def plan(self, sequences: Seq[Sequence]) -> Plan:
        return self._combined(sequences, lambda budget, part: budget.plan(part))

    def beside_prompts(self, sequences: Seq[Sequence]) -> Plan:
        return self._combined(sequences, lambda budget, part: budget.beside_prompts(part))

    def _combined(self, sequences: Seq[Sequence], plan_of: Callable[[Budget, Seq[Sequence]], Plan]) -> Plan:
        """The plans of all budgets as one."""
        groups = self._groups(sequences)
        if not groups:
            return Plan([0] * len(sequences), reason="request")
        if len(groups) == 1:
            (name,) = groups
            plan = plan_of(self._budgets[name], sequences)
            if len(groups[name]) == len(sequences):
                return plan
            return replace(plan, budgets=_at(groups[name], plan.budgets, len(sequences)))
        budgets, plans = [0] * len(sequences), []
        for name, places in groups.items():
            plans.append(plan_of(self._budgets[name], [sequences[place] for place in places]))
            for place, budget in zip(places, plans[-1].budgets, strict=True):
                budgets[place] = budget
        drafting = [plan for plan in plans if any(plan.budgets)] or plans
        return Plan(budgets, min(plan.price for plan in drafting), drafting[0].reason)

    def observe(self, cost: StepCost, outcomes: Seq[Outcome]) -> None:
        groups = self._groups([outcome.sequence for outcome in outcomes])
        if len(groups) == 1:
            (name,) = groups
            self._budgets[name].observe(cost, outcomes)
            return
        # rows that are no drafts' hide what a step costs, and so do those of other drafters
        hidden = replace(cost, num_prompt_rows=max(cost.num_prompt_rows, 1), time_draft=0.0)
        for name, places in groups.items():
            self._budgets[name].observe(hidden, [outcomes[place] for place in places])

    def stop(self, sequence: Sequence) -> None:
        for budget in self._budgets.values():
            budget.stop(sequence)

    def _groups(self, sequences: Seq[Sequence]) -> dict[str, list[int]]:
        """Name of a drafter -> places of its sequences."""
        groups: dict[str, list[int]] = {}
        for place, sequence in enumerate(sequences):
            name = self._chosen(sequence)
            if name is not None:
                groups.setdefault(name, []).append(place)
        return groups


def _at(places: Seq[int], budgets: Seq[int], count: int) -> list[int]:
    """The budgets at these places alone."""
    kept = [0] * count
    for place in places:
        kept[place] = budgets[place]
    return kept
