"""One drafter of a hybrid: what its drafts are expected to win, what they cost, and for how many nodes it is asked."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from forerun.config import MAX_NUM_DRAFT_TOKENS
from forerun.drafters.base import Drafter
from forerun.policy import Acceptance, Probes
from forerun.policy.curve import Curve
from forerun.types import Sequence

PROBE_NODES = 4
"""Nodes of a draft that is asked for only to see whether the source's acceptance has changed."""


@dataclass(slots=True, eq=False)
class Source:
    """A drafter with its measured acceptance and cost.

    Attributes:
        name: for statistics.
        drafter: who drafts.
        acceptance: of its nodes, by their place in the draft.
        cost: seconds of a draft, by the nodes asked for.
        probes: when it may be asked although no gain is expected.
        whole_draft: nodes of its drafts, where fewer would do it harm; None: any number.
    """

    name: str
    drafter: Drafter
    acceptance: Acceptance = field(default_factory=Acceptance)
    cost: Curve = field(default_factory=lambda: Curve(MAX_NUM_DRAFT_TOKENS + 1, flat=False))
    probes: Probes = field(default_factory=Probes)
    whole_draft: int | None = None

    def serves(self, budget: int) -> bool:
        """Whether it can be asked within this budget: never for less than a whole draft."""
        return self.whole_draft is None or budget >= self.whole_draft

    def size(self, nodes: int, budget: int) -> int:
        """The nodes to ask for where so many are wanted, if it serves this budget."""
        return min(nodes, budget) if self.whole_draft is None else self.whole_draft

    def chances(self, sequence: Sequence, nodes: int) -> list[float]:
        """[nodes] the chance that each node of a draft is accepted, given that the draft has it."""
        gains, chances = self.acceptance.expect_one(sequence, nodes)
        return [gain / max(chance, 1e-9) for gain, chance in zip(gains, chances, strict=True)]

    def best(self, sequence: Sequence, budget: int, rate: float, price: float, sharers: int) -> tuple[int, float]:
        """The number of nodes with the largest net gain, for a budget that it serves.

        Args:
            rate: tokens per second that are committed at present.
            price: as in `Drafter.draft`, for each node.
            sharers: sequences that share the cost of the draft.

        Returns:
            The nodes, and the expected accepted tokens less the price and the tokens that the time of drafting would
            have given.
        """
        most = self.size(budget, budget)
        gains, chances = self.acceptance.expect_one(sequence, most)
        seconds = self.cost.table(most + 1)[1 : most + 1].tolist()
        tokens, pace, nets = 0.0, rate / sharers, []
        for gain, chance, cost in zip(gains, chances, seconds, strict=True):  # lists: arrays so short are slower
            tokens += gain - price * chance
            nets.append(tokens - pace * cost)
        best = nets.index(max(nets)) if self.whole_draft is None else most - 1
        return best + 1, nets[best]

    def requests(self, candidates: Seq[tuple[Sequence, int]], rate: float, price: float) -> list[tuple[Sequence, int]]:
        """Who is to ask it, and for how many nodes: all with a net gain, or one as a probe.

        candidates: sequences and their budgets.
        """
        served = [each for each in candidates if self.serves(each[1])]
        if not self.cost:
            return [(sequence, self.size(budget, budget)) for sequence, budget in served]
        table, asked = self.cost.table(), []
        for sequence, budget in served:
            nodes, net = self.best(sequence, budget, rate, price, len(served))
            if net > 0:
                more = self.size(nodes + (nodes + 1) // 2, budget)
                if more > nodes and self.probes.due and self.probes.buy(float(table[more] - table[nodes])):
                    nodes = more  # or the acceptance of later nodes would never be seen
                asked.append((sequence, nodes))
        if not asked and served and self.probes.due:
            sequence, budget = served[0]
            nodes = self.size(PROBE_NODES, budget)
            if self.probes.buy(float(table[nodes])):
                asked.append((sequence, nodes))
        return asked
