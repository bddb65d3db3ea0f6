"""The automatic policy of drafters that draft at next to no cost and say how probable their nodes are.

They draft first, and are cut after by the same rule (`best_cut`). Nothing is explored, as copies that were cut off are
judged by the text too. Looking for drafts takes a little time, which a sequence where nothing is found cannot earn: it
then looks now and then. A hybrid's members whose drafts cost time are told the prices, and choose by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from forerun.speculation.choose_k import PLAN_STEPS, best_cut, learn_rows, prices_of
from forerun.speculation.cost_model import CostModel
from forerun.speculation.policy import DraftOutcome, DraftPlan, Reason, SpeculationPolicy, StepCost, own_reasons
from forerun.types import Draft, Sequence

MOST_NODES, LEAST_NODES = 48, 4
"""Nodes that a step's sequences may propose together, and one alone at least; most are cut."""
LEAST_PROB, FREE_PROB, FEW_ROWS = 0.1, 0.02, 8
"""Probability of nodes that are worth a look, as trees have many below it, and where rows cost next to nothing: what a
row costs of a plain step lies between. The price is that of so many rows."""
VAIN = 16
"""Searches in vain, whichever sequence's, after which a drafter that learns is not told of the steps between them."""
TRIM_GAIN = 1.02
"""Rate over plain decoding that a cut draft must promise: below it, the estimate is the larger part."""
PATIENCE, LEAST_PATIENCE, FIRST_SHARE = 8.0, 4.0, 0.1
"""Searches that a sequence can save up at most: each costs one, and what drafts save pays. At first it is granted as
many as take this share of a plain step, within the two."""
REST_SHARE, MOST_REST = 0.0025, 8
"""Share of the time of plain steps that searches of a sequence may cost which has none left, and the most steps that it
then rests: a text may begin to repeat itself at any time."""
SEARCH_MEMORY = 32
"""Largest weight of a search's mean seconds, in steps."""


class TrimmingPolicy(SpeculationPolicy):
    """Keeps the nodes of each step's drafts that raise tokens per second.

    Args:
        costs: measured ones; None begins with none.
        can_sleep: the drafter need not be told of steps in which it does not search.
        learns: it would learn from them, and must be told of them as long as drafts are found.
    """

    def __init__(self, costs: CostModel | None = None, can_sleep: bool = False, learns: bool = False) -> None:
        self.costs = costs or CostModel()
        self._can_sleep = can_sleep
        self._most_vain = VAIN if learns else 0
        self._rests = False  # no sequence searches in the present step
        self._resting = DraftPlan([])  # its plan, which stands
        self._wakes = 0  # until this step
        self._steps = self._learned = 0  # planned, and the one from which costs were learned last
        self._priced: tuple[list[Sequence], list[float]] | None = None  # prices that stand, and for which sequences
        self._left = 0  # steps for which they stand
        # searches granted, and steps between those where none is left
        self._first = PATIENCE
        self._rest = 1
        self._vain = 0  # searches since the last of which a draft was kept
        self._asked = 0  # sequences for which the present step searches; 0 if it computes drafts besides
        self._search = 0.0  # mean seconds of a search
        self._granted: dict[Sequence, float] = {}  # searches that are left
        self._due: dict[Sequence, int] = {}  # step of the next search, where none is left
        self._empty: set[Sequence] = set()  # sequences whose last search found nothing

    def plan(self, sequences: Seq[Sequence]) -> DraftPlan:
        self._steps += 1
        self._asked = 0
        if self._steps < self._wakes and len(sequences) == len(self._resting.num_draft_tokens):
            self._rests = True
            return self._resting
        most = max(LEAST_NODES, MOST_NODES // max(len(sequences), 1))
        num_draft_tokens = [most if self._searches(sequence) else 0 for sequence in sequences]
        self._rests = not any(num_draft_tokens)
        own = self._reasons(sequences, num_draft_tokens)
        if self._rests:
            self._wakes = min([self._due[sequence] for sequence in sequences])
            self._resting = DraftPlan(num_draft_tokens, reason=own[0], own_reasons=own)
            return self._resting
        num_draft_tokens = [
            k and max(min(k, each.room), 0) for k, each in zip(num_draft_tokens, sequences, strict=True)
        ]
        if not any(num_draft_tokens):
            return DraftPlan(num_draft_tokens, reason="no room", own_reasons=own)
        if self._left == 0 or self._priced is None or self._priced[0] != sequences:
            prices = prices_of(self.costs, sequences, most * len(sequences))
            if prices is None:  # what a plain step costs is measured first
                return DraftPlan([0] * len(sequences), reason="measuring")
            self._priced = (list(sequences), prices)
            self._left = PLAN_STEPS
        self._left -= 1
        self._asked = sum(map(bool, num_draft_tokens))
        prices = self._priced[1]
        row = (prices[min(FEW_ROWS, len(prices) - 1)] / prices[0] - 1) / FEW_ROWS
        own = own_reasons(sequences, num_draft_tokens, "no room") | own
        return DraftPlan(num_draft_tokens, min(max(row, FREE_PROB), LEAST_PROB), "gain", prices, own)

    def trim(self, plan: DraftPlan, sequences: Seq[Sequence], drafts: Seq[Draft]) -> DraftPlan:
        prices = plan.prices
        if prices is None:
            return plan
        self._vain += sum(map(bool, plan.num_draft_tokens))
        settled = [draft for draft in drafts if draft.is_settled]
        self._asked = 0 if settled else self._asked
        if not any(len(draft) for draft in drafts):
            return self._kept(plan, sequences, drafts, [0] * len(drafts), "nothing found")
        rows = sum([len(draft) for draft in settled])
        others = sum([sum(draft.accept_probs) for draft in settled])
        candidates = [() if draft.is_settled else draft.accept_probs for draft in drafts]
        counts, tokens, seconds = best_cut(candidates, prices[min(rows, len(prices) - 1) :], others)
        if not settled and tokens / seconds <= TRIM_GAIN * len(drafts) / prices[0]:
            return self._kept(plan, sequences, drafts, [0] * len(drafts), "no gain")
        counts = [len(draft) if draft.is_settled else count for count, draft in zip(counts, drafts, strict=True)]
        self._grant(sequences, drafts, counts, prices[0] / len(drafts), (seconds - prices[0]) / max(sum(counts), 1))
        return self._kept(plan, sequences, drafts, counts, plan.reason)

    @property
    def rests(self) -> bool:
        return self._rests

    @property
    def is_asleep(self) -> bool:
        return self._rests and self._can_sleep and self._vain >= self._most_vain

    def rest(self, seconds: float) -> None:
        self._rests = False

    def observe(self, cost: StepCost, outcomes: Seq[DraftOutcome]) -> None:
        self._rests = False
        if cost.num_prompt_rows or not outcomes:  # prompts in the forward hide what rows cost
            return
        if self._asked:
            self._search += (cost.time_draft / self._asked - self._search) / min(self._steps, SEARCH_MEMORY)
            if self._priced is not None and self._search:  # replays take no time
                plain = self._priced[1][0] / len(outcomes)
                self._first = min(max(FIRST_SHARE * plain / self._search, LEAST_PATIENCE), PATIENCE)
                self._rest = min(max(round(self._search / (REST_SHARE * plain)), 1), MOST_REST)
        if learn_rows(self.costs, cost, outcomes, self._steps - self._learned):
            self._learned = self._steps

    def stop(self, sequence: Sequence) -> None:
        self._priced = None
        self._wakes = 0
        self._empty.discard(sequence)
        self._granted.pop(sequence, None)
        self._due.pop(sequence, None)

    def _searches(self, sequence: Sequence) -> bool:
        """Return whether the next step looks for a draft of this sequence, and take what that costs."""
        granted = self._granted.get(sequence, self._first)
        if granted >= 1:
            self._granted[sequence] = granted - 1
        elif sequence.constraint is None and self._steps < self._due.get(sequence, 0):
            return False  # under a grammar forced tokens are found for nothing
        self._due[sequence] = self._steps + self._rest
        return True

    def _reasons(self, sequences: Seq[Sequence], num_draft_tokens: Seq[int]) -> dict[int, Reason]:
        """Return by index why sequences are not searched."""
        pairs = zip(sequences, num_draft_tokens, strict=True)
        return {i: "nothing found" if each in self._empty else "no gain" for i, (each, k) in enumerate(pairs) if not k}

    def _kept(
        self, plan: DraftPlan, sequences: Seq[Sequence], drafts: Seq[Draft], counts: Seq[int], reason: Reason
    ) -> DraftPlan:
        """Return the plan once so many nodes are kept. reason: of those that draft, or of all where none does."""
        own = dict(plan.own_reasons)
        for index, (sequence, draft, count) in enumerate(zip(sequences, drafts, counts, strict=True)):
            if not plan.num_draft_tokens[index]:
                continue
            (self._empty.discard if len(draft) else self._empty.add)(sequence)
            if not count:
                own[index] = "no gain" if len(draft) else "nothing found"
        return replace(plan, num_draft_tokens=list(counts), reason=reason, own_reasons=own)

    def _grant(self, sequences: Seq[Sequence], drafts: Seq[Draft], counts: Seq[int], token: float, row: float) -> None:
        """Grant further searches to sequences whose drafts are kept. token, row: seconds of each in this step."""
        for sequence, draft, count in zip(sequences, drafts, counts, strict=True):
            if count:
                self._vain = 0
                saved = sum(draft.accept_probs[:count]) * token - count * row
                searches = PATIENCE if draft.is_settled or not self._search else saved / self._search
                self._granted[sequence] = min(self._granted.get(sequence, 0.0) + max(searches, 0.0), PATIENCE)
