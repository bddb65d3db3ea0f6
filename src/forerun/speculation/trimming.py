"""The automatic policy of drafters that draft at next to no cost and say how probable their nodes are.

They draft first, and are cut after. Every node of every sequence has a probability to be accepted; the most probable
ones are kept, as many as give the most tokens per second by what rows cost. That may be none. The rule is that of
ranked slots in vLLM, with measured costs; nothing is explored, as copies that were cut off are judged by the text too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate

from forerun.speculation.cost_model import CostModel, kind_of
from forerun.speculation.cost_store import StoredCosts
from forerun.speculation.policy import DraftOutcome, DraftPlan, SpeculationPolicy, StepCost
from forerun.types import Draft, Sequence

MOST_NODES, LEAST_NODES = 48, 4
"""Nodes that a step's sequences may propose together, and one alone at least; most are cut."""
LEAST_PROB = 0.1
"""Probability of nodes that are worth a look: trees have many below it."""
TRIM_GAIN = 0.005
"""Relative gain over plain decoding that a cut draft must promise: below it, the estimate is the larger part."""


class TrimmingPolicy(SpeculationPolicy):
    """Keeps the nodes of each step's drafts that raise tokens per second.

    Args:
        stored: measured costs, shared with other engines; None begins with none, and keeps none.
    """

    def __init__(self, stored: StoredCosts | None = None) -> None:
        self._stored = stored
        self.costs = CostModel() if stored is None else stored.costs
        self._steps = 0

    def plan(self, sequences: Seq[Sequence]) -> DraftPlan:
        most = max(LEAST_NODES, MOST_NODES // max(len(sequences), 1))
        num_draft_tokens = [max(min(most, sequence.room), 0) for sequence in sequences]
        return DraftPlan(num_draft_tokens, LEAST_PROB, "gain" if any(num_draft_tokens) else "no room")

    def trim(self, plan: DraftPlan, sequences: Seq[Sequence], drafts: Seq[Draft]) -> DraftPlan:
        nodes = sorted(
            ((prob, i) for i, draft in enumerate(drafts) for prob in draft.accept_probs), key=lambda node: -node[0]
        )
        probs = [prob for prob, _ in nodes]
        none = replace(plan, num_draft_tokens=[0] * len(drafts))
        if not probs:
            return replace(none, reason="nothing found")
        batch = len(sequences)
        context = sum(len(sequence.token_ids) for sequence in sequences) - batch
        table = self.costs.target(kind_of(sequences), batch, context, batch + len(probs) + 1)
        if table is None:  # what a plain step costs is measured first
            return replace(none, reason="measuring")
        last = len(table) - 1
        seconds = [float(table[min(batch + k, last)]) for k in range(len(probs) + 1)]
        rates = [tokens / time for tokens, time in zip(accumulate(probs, initial=batch), seconds, strict=True)]
        best = max(range(len(rates)), key=rates.__getitem__)
        if rates[best] <= rates[0] * (1 + TRIM_GAIN):
            return replace(none, reason="no gain")
        kept = Counter(i for _, i in nodes[:best])
        return replace(plan, num_draft_tokens=[kept[i] for i in range(len(drafts))])

    def observe(self, cost: StepCost, outcomes: Seq[DraftOutcome]) -> None:
        self._steps += 1
        if cost.num_prompt_rows or not outcomes:  # prompts in the forward hide what rows cost
            return
        kind = kind_of([outcome.sequence for outcome in outcomes])
        seconds = cost.seconds - cost.time_draft
        self.costs.add_target(kind, len(outcomes), cost.context, cost.num_rows, seconds)

    def stop(self, sequence: Sequence) -> None:
        if self._stored is not None:
            self._stored.save_if_due(self._steps)
