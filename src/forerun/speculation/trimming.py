"""The automatic policy of drafters that draft at next to no cost and say how probable their nodes are.

They draft first, and are cut after by the same rule (`best_cut`). Nothing is explored, as copies that were cut off are
judged by the text too. A hybrid's members whose drafts cost time are told the prices, and choose by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forerun.speculation.choose_k import PLAN_STEPS, best_cut, learn_rows, prices_of
from forerun.speculation.cost_model import CostModel
from forerun.speculation.policy import DraftOutcome, DraftPlan, SpeculationPolicy, StepCost
from forerun.types import Draft, Sequence

MOST_NODES, LEAST_NODES = 48, 4
"""Nodes that a step's sequences may propose together, and one alone at least; most are cut."""
LEAST_PROB = 0.1
"""Probability of nodes that are worth a look: trees have many below it."""
TRIM_GAIN = 1.005
"""Rate over plain decoding that a cut draft must promise: below it, the estimate is the larger part."""


class TrimmingPolicy(SpeculationPolicy):
    """Keeps the nodes of each step's drafts that raise tokens per second.

    Args:
        costs: measured ones; None begins with none.
    """

    def __init__(self, costs: CostModel | None = None) -> None:
        self.costs = costs or CostModel()
        self._steps = 0
        self._priced: tuple[list[Sequence], list[float]] | None = None  # prices that stand, and for which sequences
        self._left = 0  # steps for which they stand

    def plan(self, sequences: Seq[Sequence]) -> DraftPlan:
        most = max(LEAST_NODES, MOST_NODES // max(len(sequences), 1))
        num_draft_tokens = [max(min(most, sequence.room), 0) for sequence in sequences]
        if not any(num_draft_tokens):
            return DraftPlan(num_draft_tokens, reason="no room")
        if self._left == 0 or self._priced is None or self._priced[0] != sequences:
            prices = prices_of(self.costs, sequences, most * len(sequences))
            if prices is None:  # what a plain step costs is measured first
                return DraftPlan([0] * len(sequences), reason="measuring")
            self._priced, self._left = (list(sequences), prices), PLAN_STEPS
        self._left -= 1
        return DraftPlan(num_draft_tokens, LEAST_PROB, "gain", self._priced[1])

    def trim(self, plan: DraftPlan, sequences: Seq[Sequence], drafts: Seq[Draft]) -> DraftPlan:
        prices = plan.prices
        if prices is None:
            return plan
        if not any(len(draft) for draft in drafts):
            return DraftPlan([0] * len(drafts), plan.min_acceptance_prob, "nothing found")
        settled = [draft for draft in drafts if draft.is_settled]
        rows, others = sum([len(draft) for draft in settled]), sum([sum(draft.accept_probs) for draft in settled])
        candidates = [() if draft.is_settled else draft.accept_probs for draft in drafts]
        counts, tokens, seconds = best_cut(candidates, prices[min(rows, len(prices) - 1) :], others)
        if not settled and tokens / seconds <= TRIM_GAIN * len(drafts) / prices[0]:
            return DraftPlan([0] * len(drafts), plan.min_acceptance_prob, "no gain")
        counts = [len(draft) if draft.is_settled else count for count, draft in zip(counts, drafts, strict=True)]
        return DraftPlan(counts, plan.min_acceptance_prob, plan.reason, prices)

    def observe(self, cost: StepCost, outcomes: Seq[DraftOutcome]) -> None:
        self._steps += 1
        if not cost.num_prompt_rows and outcomes:  # prompts in the forward hide what rows cost
            learn_rows(self.costs, cost, outcomes, self._steps)

    def stop(self, sequence: Sequence) -> None:
        self._priced = None
