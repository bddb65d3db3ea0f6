"""The budget that chooses K by itself, 0 included, from measured acceptance and costs.

It maximises expected tokens per second over all sequences of a step together ("goodput": SmartSpec, 2406.14066), and
its price is the chance of acceptance below which a further node lowers them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from forerun.config import MAX_NUM_DRAFT_TOKENS
from forerun.policy.acceptance import Acceptance
from forerun.policy.budget import Outcome, Plan, StepCost
from forerun.policy.cost_store import StoredCosts
from forerun.policy.costs import COST_TRUSTED, CostModel
from forerun.policy.curve import COST_CLIP, Table
from forerun.policy.goodput import Prospects, ProspectsAlone, price
from forerun.policy.probes import Probes
from forerun.types import Sequence

COST_SAVE_STEPS = 32
"""Steps after which costs are first saved; then whenever that many have doubled."""
PLAN_STEPS = 4
"""Steps a plan stands while the batch is the same."""
PLACES_ALONE = 16
"""Budgets that are compared for a single sequence; or twice the standing one, if that is more."""
PLAN_MARGIN = 0.01
"""Relative gain in tokens per second by which another plan must beat the standing one."""
PLAN_MARGIN_PLAIN = 0.02
"""The same where one of the two is plain decoding."""
PROBE_FORGETS = 0.8
"""Weight that a sequence's earlier trials keep when it drafts after a pause, since much may have changed."""


class AutoBudget:
    """Chooses every sequence's K, 0 included, and the price: the chance of acceptance that a draft's nodes must reach.

    What the engine writes does not depend on it, only how fast.

    Args:
        stored: measured costs, shared with other engines; None begins with none, and keeps none.
        max_tokens: K is never larger.
    """

    def __init__(self, stored: StoredCosts | None = None, max_tokens: int = MAX_NUM_DRAFT_TOKENS) -> None:
        self._stored = stored
        self.costs = CostModel() if stored is None else stored.costs
        self._steps, self._save_at = 0, COST_SAVE_STEPS
        self._max = max_tokens
        self._acceptance = Acceptance(max_tokens)
        self._probes = Probes()
        self._chosen: dict[Sequence, int] = {}  # the standing plan
        self._planned: list[Sequence] = []
        self._kind = ""
        self._known: Prospects | ProspectsAlone | None = None  # from which it was made
        self._places = 1  # largest budget that was considered
        self._price = 0.0
        self._left = 0  # steps for which it stands
        self._rate = 0.0  # tokens per second that it is expected to give
        self._plain: Plan | None = None  # the plan itself, where nobody drafts
        self._unlearned: list[StepCost] = []  # steps under it
        self._alone = 0  # the last K of a single sequence
        self._cell = (0, 0)  # the last threshold and limit of several
        self._turn = 0
        self._forgone = 0.0  # tokens that plain decoding would give in the time of the present probe; 0 without one
        self._idle: dict[Sequence, int] = {}  # the last step in which the sequence drafted, or before it came

    def plan(self, sequences: Seq[Sequence]) -> Plan:
        if self._left > 0 and self._planned == sequences:
            self._left -= 1
            if self._plain is not None:
                return self._plain
        else:
            self._replan(sequences)
        budgets = [min(self._chosen[sequence], max(sequence.room, 0)) for sequence in sequences]
        probe = self._probe(sequences, budgets) if self._rate > 0 and self._probes.due else None
        if probe is not None:
            return Plan(probe)
        plan = Plan(budgets, self._price)
        if self._rate > 0 and not any(self._chosen[sequence] for sequence in sequences):
            self._plain = plan
        return plan

    def observe(self, cost: StepCost, outcomes: Seq[Outcome]) -> None:
        """Learn from a step. Steps that computed prompts as well say nothing of what drafts cost."""
        self._steps += 1
        if cost.num_prompt_rows == 0 and outcomes:
            if self._plain is not None and len(outcomes) == len(self._planned):
                self._unlearned.append(cost)
                return
            self._learn_costs(cost, outcomes)
        for outcome in outcomes:
            sequence = outcome.sequence
            if outcome.budget == 0:
                continue
            rested = self._rested(sequence)
            self._idle[sequence] = self._steps
            self._acceptance.observe(
                sequence,
                outcome.budget,
                min(outcome.draft.num_candidates, len(outcome.draft)),
                outcome.verdict.path,
                PROBE_FORGETS if rested else 1.0,
            )
        if self._forgone:
            tokens = len(outcomes) + sum(len(outcome.verdict.path) for outcome in outcomes)
            self._probes.judge(tokens > self._forgone)
            self._forgone = 0.0

    def stop(self, sequence: Sequence) -> None:
        self._learn_plain()
        self._acceptance.stop(sequence)
        self._chosen.pop(sequence, None)
        self._idle.pop(sequence, None)
        if self._stored is not None and self._steps >= self._save_at:
            self._save_at = 2 * self._steps
            self._stored.save()
        self._planned = [other for other in self._planned if other is not sequence]

    def _rested(self, sequence: Sequence) -> bool:
        """Whether the sequence, which drafted in this step, did not in the step before it."""
        return self._steps > self._idle.get(sequence, self._steps) + 1

    def _learn_costs(self, cost: StepCost, outcomes: Seq[Outcome]) -> None:
        seconds = cost.time_target + cost.time_verify + cost.time_rest
        kind = _kind([outcome.sequence for outcome in outcomes])
        self.costs.add_target(kind, len(outcomes), cost.context, cost.num_rows, seconds)
        asked = [outcome for outcome in outcomes if outcome.budget > 0]
        if asked:
            # after a pause the drafter may have to catch up
            rested = all(self._rested(outcome.sequence) for outcome in asked)
            longest = max(outcome.budget for outcome in asked)
            self.costs.add_draft(len(asked), longest, cost.time_draft, 0.25 if rested else 1.0)
        else:
            self.costs.add_idle(cost.time_draft)
        self._probes.earn(seconds + cost.time_draft)

    def _learn_plain(self) -> None:
        """Learn from the steps since the last plan, in which nobody drafted, by their mean."""
        count = len(self._unlearned)
        if count == 0:
            return
        context = sum(cost.context for cost in self._unlearned) / count
        seconds = [cost.time_target + cost.time_verify + cost.time_rest for cost in self._unlearned]
        idle = [cost.time_draft for cost in self._unlearned]
        batch = len(self._planned)
        self.costs.add_target(self._kind, batch, context, batch, _clipped_mean(seconds), count)
        self.costs.add_idle(_clipped_mean(idle), count)
        self._probes.earn(sum(seconds) + sum(idle), count)
        self._unlearned.clear()

    def _replan(self, sequences: Seq[Sequence]) -> None:
        self._learn_plain()
        self._planned, self._kind, self._plain = list(sequences), _kind(sequences), None
        for sequence in sequences:
            self._idle.setdefault(sequence, self._steps)
        batch = len(sequences)
        places = self._places = max(1, min(self._max, 2 * self.costs.largest_draft))
        if batch == 1:
            places = self._places = min(places, max(PLACES_ALONE, 2 * self._alone))
        context = sum(len(sequence.token_ids) for sequence in sequences) - batch
        target = self.costs.target(self._kind, batch, context, batch * (places + 1) + 1)
        if target is None:  # what a plain step costs is measured first
            self._known = None
            self._settle(sequences, [0] * batch, 0.0, 0.0)
            self._left = 0
            return
        draft = self.costs.draft(batch, places)
        if batch == 1:
            rate, budgets = self._best_alone(sequences[0], target.tolist(), draft.tolist())
        else:
            rate, budgets = self._best_together(sequences, target, draft)
        self._settle(sequences, budgets, rate, price(rate, budgets, target, draft))

    def _settle(self, sequences: Seq[Sequence], budgets: list[int], rate: float, price: float) -> None:
        self._chosen.update(zip(sequences, budgets, strict=True))
        self._rate, self._price = rate, price
        longest = max(budgets)
        self._left = (PLAN_STEPS if longest else max(PLAN_STEPS, math.ceil(self._probes.wait))) - 1
        if longest:
            self._probes.judge(gained=True)
        if self.costs.largest_draft < min(self._max, longest):
            self._left = 0  # the first of its kind is judged at once

    def _best_alone(self, sequence: Sequence, target: Seq[float], draft: Seq[float]) -> tuple[float, list[int]]:
        """Tokens per second, and the budget that gives them; the standing one, unless another is clearly better."""
        gains, chances = self._acceptance.expect_one(sequence, self._places)
        known = self._known = ProspectsAlone(gains, chances, target, draft)
        rates = known.rates
        best = rates.index(max(rates))
        stay = min(self._chosen.get(sequence, self._alone), self._places)
        if not _clearly_better(rates[best], rates[stay], (best == 0) != (stay == 0)):
            best = stay
        self._alone = best
        return rates[best], [best]

    def _best_together(self, sequences: Seq[Sequence], target: Table, draft: Table) -> tuple[float, list[int]]:
        """The same of several sequences."""
        gains, chances = self._acceptance.expect(sequences, self._places)
        known = self._known = Prospects(gains, chances, target, draft)
        grid, choices = known.rates_together()
        best = int(grid.argmax()) // grid.shape[1], int(grid.argmax()) % grid.shape[1]
        stay = min(self._cell[0], grid.shape[0] - 1), min(self._cell[1], grid.shape[1] - 1)
        plain = [not choices[cell].any() for cell in (best, stay)]
        if not _clearly_better(grid[best], grid[stay], plain[0] != plain[1]):
            best = stay
        self._cell = best
        budgets: list[int] = choices[best].tolist()
        return float(grid[best]), budgets

    def _probe(self, sequences: Seq[Sequence], budgets: list[int]) -> list[int] | None:
        """Other budgets for this step, if some that might show something new can be afforded."""
        if self._known is None:
            return None
        self._turn += 1
        idle = not any(budgets)
        other = self._idle_probe(sequences) if idle else self._busy_probe(sequences, budgets)
        other = [min(budget, max(sequence.room, 0)) for sequence, budget in zip(sequences, other, strict=True)]
        if other == budgets:
            return None
        tokens, seconds = self._known.outlook(other)
        if not self._probes.buy(seconds - tokens / self._rate):
            return None
        if idle:
            self._forgone = seconds * self._rate
            self._left = 0  # what it shows is considered at once
        return other

    def _idle_probe(self, sequences: Seq[Sequence]) -> list[int]:
        """One of the sequences drafts, the one that has not for longest."""
        longest = min(range(len(sequences)), key=lambda i: self._idle[sequences[i]])
        few = self._known.rates[1:5] if isinstance(self._known, ProspectsAlone) else [1.0]
        budget = few.index(max(few)) + 1
        return [budget if i == longest else 0 for i in range(len(sequences))]

    def _busy_probe(self, sequences: Seq[Sequence], budgets: list[int]) -> list[int]:
        """In turn: longer drafts, sequences that do not draft, and a plain step, where it may be the better one."""
        assert self._known is not None
        if self._turn % 3 == 0:
            tokens, seconds = self._known.outlook([0] * len(budgets))
            rows = self.costs.seen_rows(self._kind, len(budgets), len(budgets))
            return [0] * len(budgets) if rows < COST_TRUSTED or self._rate < 1.5 * tokens / seconds else budgets
        if self._turn % 3 == 1 and 0 in budgets:
            zeros = [i for i, budget in enumerate(budgets) if budget == 0]
            longest = min(zeros, key=lambda i: self._idle[sequences[i]])
            return [max(budget, int(i == longest)) for i, budget in enumerate(budgets)]
        return [min(budget + (budget + 1) // 2, self._places) for budget in budgets]


def _clearly_better(best: float, stay: float, one_is_plain: bool) -> bool:
    return best > stay * (1 + (PLAN_MARGIN_PLAIN if one_is_plain else PLAN_MARGIN))


def _clipped_mean(seconds: Seq[float]) -> float:
    """The mean, where what exceeds the median by the factor COST_CLIP counts as so much."""
    most = COST_CLIP * sorted(seconds)[len(seconds) // 2]
    return sum(min(each, most) for each in seconds) / len(seconds)


def _kind(sequences: Seq[Sequence]) -> str:
    return "greedy" if all(sequence.params.greedy for sequence in sequences) else "drawn"
