"""The policy that chooses K automatically, 0 included, from measured acceptance and costs.

It maximises expected tokens per second over all sequences of a step together ("goodput": SmartSpec, 2406.14066), and
its `min_acceptance_prob` is the probability of acceptance below which a further node lowers them. Drafters of
fixed-length drafts get another policy (`automatic_policy`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.config import MAX_NUM_DRAFT_TOKENS
from forerun.speculation.acceptance import AcceptanceStats
from forerun.speculation.cost_model import COST_TRUSTED, CostModel, Table, clipped_mean, kind_of
from forerun.speculation.cost_store import StoredCosts, costs_setting, forward_costs
from forerun.speculation.exploration import Pauses, Probes, cheapest_trial
from forerun.speculation.fixed_length import FixedLengthPolicy
from forerun.speculation.goodput import (
    GAIN_ALONE,
    GAIN_TOGETHER,
    Prospects,
    ProspectsAlone,
    min_acceptance_prob as prob_that_pays,
    pays,
)
from forerun.speculation.policy import DraftOutcome, DraftPlan, Reason, SpeculationPolicy, StepCost
from forerun.speculation.trimming import TrimmingPolicy
from forerun.types import Sequence

PROBE_FORGETS = 0.8
"""Weight that a sequence's earlier trials keep when it drafts after a pause, since much may have changed."""
PARTLY_RESTED = 0.25
"""Weight of a step's drafting time where some of the sequences that drafted had to be caught up with."""


@dataclass(slots=True)
class _PlannedStep:
    """The drafting of one step.

    Attributes:
        count: sequences that were to draft. longest: their largest K.
        rested: those of them that drafted for the first time, or after a pause.
        lag: tokens that the drafter had not seen of these.
    """

    count: int = 0
    longest: int = 0
    rested: int = 0
    lag: int = 0

    @property
    def share(self) -> float:
        """Return the weight of the step among drafts of usual cost; 0 if all drafts included the drafter's prefill."""
        return 1.0 if not self.rested else PARTLY_RESTED if self.rested < self.count else 0.0


class Lessons:
    """Steps are noted as they come, and learned from together.

    Args:
        costs, acceptance, probes, pauses: learn of them.
        catches_up: the drafter computes with prompts because it may be asked for drafts; it need not follow them.
    """

    def __init__(
        self, costs: CostModel, acceptance: AcceptanceStats, probes: Probes, pauses: Pauses, catches_up: bool = False
    ) -> None:
        self._costs, self._acceptance, self._probes, self._pauses = costs, acceptance, probes, pauses
        self._catches_up = catches_up
        self._following = 0.0  # seconds in the drafter, in steps that held prompts
        self._noted: list[tuple[int, StepCost, Seq[DraftOutcome]]] = []
        self.steps = 0

    def note(self, cost: StepCost, outcomes: Seq[DraftOutcome]) -> None:
        """Note a step that is done."""
        self.steps += 1
        self._noted.append((self.steps, cost, outcomes))

    def learn(self, planned_kind: str, num_planned: int) -> int:
        """Learn: acceptance step by step, costs by the mean of each kind of step.

        Args:
            planned_kind: of requests, in steps of so many sequences (`num_planned`).

        Returns:
            Tokens that came in those of these steps in which some sequence drafted.
        """
        noted, self._noted = self._noted, []
        kinds: dict[tuple[str, int, int, int, int, float], list[tuple[StepCost, _PlannedStep]]] = {}
        tokens = 0
        for number, cost, outcomes in noted:
            asked = self._learn_acceptance(number, outcomes)
            batch = len(outcomes)
            if asked.count:
                tokens += batch + sum([len(outcome.verdict.path) for outcome in outcomes])
            if batch and cost.num_prompt_rows == 0:  # prompts in the forward hide what drafts cost
                kind = planned_kind if batch == num_planned else kind_of([each.sequence for each in outcomes])
                key = (kind, batch, cost.num_rows, asked.count, asked.longest, asked.share)
                kinds.setdefault(key, []).append((cost, asked))
            elif batch:  # in a crowd there may be prompts in nearly every step
                self._probes.earn(cost.seconds)
            if cost.num_prompt_rows and not asked.count:
                self._following += cost.time_draft
        if self._catches_up and (came := self._pauses.tokens_that_came()):  # they come when their prompts are done
            self._costs.add_following(self._following, came)
            self._following = 0.0
        for (kind, batch, num_rows, *_), steps in kinds.items():
            self._learn_costs(kind, batch, num_rows, steps)
        return tokens

    def _learn_costs(self, kind: str, batch: int, num_rows: int, steps: Seq[tuple[StepCost, _PlannedStep]]) -> None:
        """Learn the costs of steps of one kind."""
        count, asked = len(steps), steps[0][1]
        seconds = [cost.time_target + cost.time_verify + cost.time_rest for cost, _ in steps]
        drafting = [cost.time_draft for cost, _ in steps]
        context = sum([cost.context for cost, _ in steps]) / count
        self._costs.add_target(kind, batch, context, num_rows, clipped_mean(seconds), count)
        if not asked.count:
            self._costs.add_idle(clipped_mean(drafting), count)
        elif asked.share:
            self._costs.add_draft(asked.count, asked.longest, clipped_mean(drafting), count * asked.share)
        else:
            for cost, each in steps:
                self._costs.add_first_draft(each.count, each.longest, each.lag, cost.time_draft)
        self._probes.earn(sum(seconds) + sum(drafting), count)

    def _learn_acceptance(self, number: int, outcomes: Seq[DraftOutcome]) -> _PlannedStep:
        """Learn the acceptance of one step."""
        asked = _PlannedStep()
        for outcome in outcomes:
            num_draft_tokens, sequence, draft = outcome.num_draft_tokens, outcome.sequence, outcome.draft
            if num_draft_tokens == 0:
                continue
            lag = self._pauses.lag(sequence, number)
            forget = PROBE_FORGETS if self._pauses.has_paused(sequence, number) else 1.0
            self._pauses.drafted(sequence, number)
            asked.count += 1
            asked.longest = max(asked.longest, num_draft_tokens)
            asked.rested += lag > 0
            asked.lag += lag
            drafted = min(draft.num_candidates, len(draft))
            self._acceptance.observe(sequence, num_draft_tokens, drafted, outcome.verdict.path, forget)
        return asked


PLAN_STEPS = 4
"""Steps a plan stands while the batch is the same."""
PLAIN_CELL = (0, 0)
"""Of `Prospects.rates_together`: no sequence drafts."""
PLACES_ALONE = 16
"""Values of K that are compared for a single sequence; or twice the standing one, if that is more."""
PLAN_MARGIN = 0.01
"""Relative gain in tokens per second by which another plan must beat the standing one."""
PLACES_REASON = 8
"""Values of K by which a batch that does not draft is compared with one sequence alone."""
HORIZON = 64
"""Tokens that are at least to come when drafting begins, as far as is assumed; else as many as came so far."""
START_MARGIN = 1.5
"""Factor on the time of the drafter's prefill that drafts must save, against the optimistic bias of the maximum."""
PROBE_LENGTHS = (1, 2)
"""Steps, in turn, of probes in which sequences draft that did not. In the first the drafter may have to catch up:
only the second shows what it costs otherwise."""


class AutomaticPolicy(SpeculationPolicy):
    """Chooses every sequence's K, 0 included, and the probability of acceptance that a draft's nodes must reach.

    The choice changes the speed of the engine, and not its output.

    Args:
        stored: measured costs, shared with other engines; None begins with none, and keeps none.
        max_tokens: K is never larger.
        catches_up: as `Lessons` has it.
    """

    def __init__(
        self,
        stored: StoredCosts | None = None,
        max_tokens: int = MAX_NUM_DRAFT_TOKENS,
        *,
        catches_up: bool = False,
    ) -> None:
        self._stored = stored
        self.costs = CostModel() if stored is None else stored.costs
        self._max = max_tokens
        self.acceptance = AcceptanceStats(max_tokens)
        self._probes, self._pauses = Probes(), Pauses()
        self._lessons = Lessons(self.costs, self.acceptance, self._probes, self._pauses, catches_up)
        self._chosen: dict[Sequence, int] = {}  # the standing plan
        self._planned: list[Sequence] = []
        self._kind = ""
        self._prospects: Prospects | ProspectsAlone | None = None  # from which it was made
        self._places = 1  # largest K that was considered
        self._min_acceptance_prob = 0.0
        self._left = 0  # steps for which it stands
        self._rate = 0.0  # tokens per second that it is expected to give
        self._reason: Reason = "measuring"
        self._plain: DraftPlan | None = None  # the plan itself, where no sequence drafts
        self._alone = 0  # the last K of a single sequence
        self._cell = PLAIN_CELL  # the last threshold and limit of several
        self._turn = self._trials = 0
        self._forgone = 0.0  # tokens that plain decoding would give in the time of the present probe; 0 without one
        self._trial: list[int] | None = None  # the numbers of draft tokens of its second step, until that is planned

    def plan(self, sequences: Seq[Sequence]) -> DraftPlan:
        standing = self._left > 0 and self._planned == sequences
        if not standing:
            self._replan(sequences)
        else:
            self._left -= 1
            if self._trial is not None:
                trial, self._trial = self._trial, None
                return DraftPlan(_within_room(trial, sequences), reason="probe")
            if self._plain is not None:
                return self._plain
        num_draft_tokens = _within_room([self._chosen[sequence] for sequence in sequences], sequences)
        if not standing and self._rate > 0 and self._probes.due:
            probe = self._probe(sequences, num_draft_tokens)
            if probe is not None:
                return DraftPlan(probe, reason="probe")
        reason = self._reason
        if reason == "gain" and not any(num_draft_tokens):
            reason = "no room"
        plan = DraftPlan(num_draft_tokens, self._min_acceptance_prob, reason)
        if self._left and not any(self._chosen[sequence] for sequence in sequences):
            self._plain = plan
        return plan

    def observe(self, cost: StepCost, outcomes: Seq[DraftOutcome]) -> None:
        """Note a step. What the plan's steps have shown is learned together, after the last of them."""
        self._lessons.note(cost, outcomes)
        if self._left == 0:
            self._learn()

    def stop(self, sequence: Sequence) -> None:
        self._learn()
        self.acceptance.stop(sequence)
        self._chosen.pop(sequence, None)
        self._pauses.stop(sequence)
        if self._stored is not None:
            self._stored.save_if_due(self._lessons.steps)
        self._planned, self._left = [], 0

    def _learn(self) -> None:
        """Learn from the steps since the last plan."""
        tokens = self._lessons.learn(self._kind, len(self._planned))
        if self._forgone and self._trial is None:  # the probe's steps are the only ones of its plan
            self._probes.judge(tokens > self._forgone)
        self._forgone, self._trial = 0.0, None

    def _replan(self, sequences: Seq[Sequence]) -> None:
        self._learn()
        self._planned, self._kind, self._plain = list(sequences), kind_of(sequences), None
        for sequence in sequences:
            self._pauses.come(sequence, self._lessons.steps)
        batch = len(sequences)
        places = self._places = max(1, min(self._max, 2 * self.costs.largest_draft))
        if batch == 1:
            places = self._places = min(places, max(PLACES_ALONE, 2 * self._alone))
        context = sum(len(sequence.token_ids) for sequence in sequences) - batch
        target = self.costs.target(self._kind, batch, context, batch * (places + 1) + 1)
        if target is None:  # what a plain step costs is measured first
            self._prospects = None
            self._settle(sequences, [0] * batch, 0.0, 0.0)
            self._left, self._reason = 0, "measuring"
            return
        draft = self.costs.draft(batch, places)
        if batch == 1:
            rate, num_draft_tokens = self._best_alone(sequences[0], target.tolist(), draft.tolist())
        else:
            rate, num_draft_tokens = self._best_together(sequences, target, draft)
        self._settle(sequences, num_draft_tokens, rate, prob_that_pays(rate, num_draft_tokens, target, draft))
        self._reason = (
            "gain" if any(num_draft_tokens) else "full batch" if self._gains_alone(batch, context) else "no gain"
        )

    def _settle(
        self, sequences: Seq[Sequence], num_draft_tokens: list[int], rate: float, min_acceptance_prob: float
    ) -> None:
        longest = max(num_draft_tokens)
        kept = all(self._chosen.get(sequence) == k for sequence, k in zip(sequences, num_draft_tokens, strict=True))
        self._chosen.update(zip(sequences, num_draft_tokens, strict=True))
        self._rate, self._min_acceptance_prob = rate, min_acceptance_prob
        steps = 2 * PLAN_STEPS if kept else PLAN_STEPS
        self._left = (steps if longest else max(PLAN_STEPS, math.ceil(self._probes.wait))) - 1
        if longest:
            self._probes.judge(gained=True)
        if self.costs.largest_draft < min(self._max, longest):
            self._left = 0  # the first of its kind is judged at once

    def _best_alone(self, sequence: Sequence, target: Seq[float], draft: Seq[float]) -> tuple[float, list[int]]:
        """Return the tokens per second and K of one sequence; the standing K, unless another is clearly better."""
        gains, accept_probs = self.acceptance.expect_one(sequence, self._places)
        prospects = self._prospects = ProspectsAlone(gains, accept_probs, target, draft)
        rates = prospects.rates
        best = rates.index(max(rates))
        stay = min(self._chosen.get(sequence, self._alone), self._places)
        if best and stay and rates[best] <= rates[stay] * (1 + PLAN_MARGIN):
            best = stay
        drafts = pays(rates[best], rates[0], GAIN_ALONE, goes_on=stay > 0)
        if not drafts or not self._earns_its_start(sequence, rates[best], rates[0]):
            best = 0
        self._alone = best
        return rates[best], [best]

    def _best_together(self, sequences: Seq[Sequence], target: Table, draft: Table) -> tuple[float, list[int]]:
        """Return the tokens per second and K of several sequences."""
        gains, accept_probs = self.acceptance.expect(sequences, self._places)
        prospects = self._prospects = Prospects(gains, accept_probs, target, draft, self.costs.growth)
        grid, choices = prospects.rates_together()
        best = int(grid.argmax()) // grid.shape[1], int(grid.argmax()) % grid.shape[1]
        stay = min(self._cell[0], grid.shape[0] - 1), min(self._cell[1], grid.shape[1] - 1)
        drafts = bool(choices[stay].any())
        if drafts and grid[best] <= grid[stay] * (1 + PLAN_MARGIN):
            best = stay
        if not pays(grid[best], grid[PLAIN_CELL], GAIN_TOGETHER, goes_on=drafts):
            best = PLAIN_CELL
        self._cell = best
        rate, plain, num_draft_tokens = float(grid[best]), float(grid[PLAIN_CELL]), choices[best].tolist()
        starts = [self._earns_its_start(sequence, rate, plain) for sequence in sequences]
        earning = [k if earns else 0 for k, earns in zip(num_draft_tokens, starts, strict=True)]
        if earning != num_draft_tokens:
            tokens, seconds = prospects.outlook(earning)
            rate = tokens / seconds
        return rate, earning

    def _earns_its_start(self, sequence: Sequence, rate: float, plain: float) -> bool:
        """Return whether its drafts will save more time than the drafter's prefill takes.

        rate, plain: tokens per second of all sequences together with drafts and without.
        """
        lost = START_MARGIN * self._catching_up([sequence])
        return lost == 0 or lost <= min(max(HORIZON, sequence.num_output), max(sequence.room, 1)) * (
            1 / plain - 1 / rate
        )

    def _catching_up(self, sequences: Seq[Sequence]) -> float:
        """Return the seconds of the drafter's prefill of these sequences, if they are to draft."""
        step = self._lessons.steps + 1
        return self.costs.catch_up(sum([self._pauses.lag(sequence, step) for sequence in sequences]))

    def _gains_alone(self, batch: int, context: float) -> bool:
        """Return whether drafting at this batch's mean acceptance would pay for one sequence alone."""
        prospects = self._prospects
        if not isinstance(prospects, Prospects):
            return False
        places = min(self._places, PLACES_REASON)
        target = self.costs.target(self._kind, 1, context / batch, places + 2)
        assert target is not None
        gains, accept_probs = (each[:, :places].mean(0).tolist() for each in (prospects.gains, prospects.accept_probs))
        rates = ProspectsAlone(gains, accept_probs, target.tolist(), self.costs.draft(1, places).tolist()).rates
        return pays(max(rates[1:]), rates[0], GAIN_ALONE, goes_on=False)

    def _probe(self, sequences: Seq[Sequence], num_draft_tokens: list[int]) -> list[int] | None:
        """Return other numbers of draft tokens to try in this step, if some can be afforded; else None."""
        if self._prospects is None:
            return None
        self._turn += 1
        idle = not any(num_draft_tokens)
        other = self._idle_probe(sequences) if idle else self._busy_probe(sequences, num_draft_tokens)
        other = _within_room(other, sequences)
        if other == num_draft_tokens:
            return None
        tokens, seconds = self._prospects.outlook(other)
        if not idle:
            return other if self._probes.buy(seconds - tokens / self._rate) else None
        steps = PROBE_LENGTHS[self._trials % len(PROBE_LENGTHS)]
        asked = [sequence for sequence, k in zip(sequences, other, strict=True) if k]
        if not self._probes.buy(steps * (seconds - tokens / self._rate) + self._catching_up(asked)):
            return None
        self._trials += 1
        self._forgone = steps * seconds * self._rate
        self._left = steps - 1  # what they show is then learned and considered at once
        self._trial = other if self._left else None
        return other

    def _idle_probe(self, sequences: Seq[Sequence]) -> list[int]:
        """Choose sequences that draft in a probe: those that have not for longest."""
        assert self._prospects is not None
        if isinstance(self._prospects, ProspectsAlone):
            return [max(range(1, min(5, len(self._prospects.rates))), key=self._prospects.rates.__getitem__)]
        order = sorted(range(len(sequences)), key=lambda i: self._pauses.last(sequences[i]))
        return cheapest_trial(self._prospects, order, self._rate)

    def _busy_probe(self, sequences: Seq[Sequence], num_draft_tokens: list[int]) -> list[int]:
        """Choose in turn longer drafts, sequences that do not draft, and a plain step, where it may be better."""
        assert self._prospects is not None
        if self._turn % 3 == 0:
            tokens, seconds = self._prospects.outlook([0] * len(num_draft_tokens))
            rows = self.costs.seen_rows(self._kind, len(num_draft_tokens), len(num_draft_tokens))
            return (
                [0] * len(num_draft_tokens)
                if rows < COST_TRUSTED or self._rate < 1.5 * tokens / seconds
                else num_draft_tokens
            )
        if self._turn % 3 == 1 and 0 in num_draft_tokens:
            zeros = [i for i, k in enumerate(num_draft_tokens) if k == 0]
            longest = min(zeros, key=lambda i: self._pauses.last(sequences[i]))
            return [max(k, int(i == longest)) for i, k in enumerate(num_draft_tokens)]
        return [min(k + (k + 1) // 2, self._places) for k in num_draft_tokens]


def automatic_policy(
    *,
    fixed_length_draft: int | None,
    cost_key: tuple[str, ...] | None,
    catches_up: bool = False,
    estimates: bool = False,
) -> SpeculationPolicy:
    """Make the policy that chooses K by measurement.

    Args:
        fixed_length_draft: nodes of the drafter's fixed-length drafts; None for every other drafter.
        cost_key: all that costs depend on besides machine and threads (the target with its number format first, then
            the drafter with its models): the policy begins with the costs that earlier engines of the same key
            measured, and keeps what it measures. None begins with nothing and keeps nothing.
        catches_up: as `Lessons` has it.
        estimates: the drafter drafts at next to no cost, and its drafts have `accept_probs`.
    """
    if fixed_length_draft is not None:
        return FixedLengthPolicy(fixed_length_draft)
    if cost_key is None:
        return TrimmingPolicy() if estimates else AutomaticPolicy(catches_up=catches_up)
    stored = StoredCosts(costs_setting(cost_key))
    stored.costs.begin_with(forward_costs(cost_key[0]).costs)
    if estimates:
        return TrimmingPolicy(stored)
    return AutomaticPolicy(stored, catches_up=catches_up)


def _within_room(num_draft_tokens: Seq[int], sequences: Seq[Sequence]) -> list[int]:
    return [min(k, max(sequence.room, 0)) for k, sequence in zip(num_draft_tokens, sequences, strict=True)]
