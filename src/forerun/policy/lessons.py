"""What steps teach: acceptance of drafts, costs of each kind of step, and how much time probes may take."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.policy.acceptance import Acceptance
from forerun.policy.budget import Outcome, StepCost
from forerun.policy.costs import CostModel
from forerun.policy.curve import clipped_mean
from forerun.policy.pauses import Pauses
from forerun.policy.probes import Probes
from forerun.types import Sequence

PROBE_FORGETS = 0.8
"""Weight that a sequence's earlier trials keep when it drafts after a pause, since much may have changed."""
PARTLY_RESTED = 0.25
"""Weight of a step's drafting time where some of the sequences that drafted had to be caught up with."""


@dataclass(slots=True)
class _Asked:
    """What one step asked of the drafter.

    Attributes:
        count: sequences that were to draft. longest: their largest budget.
        rested: those of them that drafted for the first time, or after a pause.
        lag: tokens that the drafter had not seen of these.
    """

    count: int = 0
    longest: int = 0
    rested: int = 0
    lag: int = 0

    @property
    def share(self) -> float:
        """What the step counts of what drafts usually cost; nothing if the drafter had to catch up with all of them."""
        return 1.0 if not self.rested else PARTLY_RESTED if self.rested < self.count else 0.0


class Lessons:
    """Steps are noted as they come, and learned from together.

    Args:
        costs, acceptance, probes, pauses: learn of them.
        catches_up: the drafter computes with prompts because it may be asked for drafts; it need not follow them.
    """

    def __init__(
        self, costs: CostModel, acceptance: Acceptance, probes: Probes, pauses: Pauses, catches_up: bool = False
    ) -> None:
        self._costs, self._acceptance, self._probes, self._pauses = costs, acceptance, probes, pauses
        self._catches_up = catches_up
        self._following = 0.0  # seconds in the drafter, in steps that held prompts
        self._noted: list[tuple[int, StepCost, Seq[Outcome]]] = []
        self.steps = 0

    def note(self, cost: StepCost, outcomes: Seq[Outcome]) -> None:
        """A step is done."""
        self.steps += 1
        self._noted.append((self.steps, cost, outcomes))

    def learn(self, planned_kind: str, num_planned: int) -> int:
        """Learn: acceptance step by step, costs by the mean of each kind of step.

        Args:
            planned_kind: of requests, in steps of so many sequences (`num_planned`).

        Returns:
            Tokens that came in those of these steps in which somebody drafted.
        """
        noted, self._noted = self._noted, []
        kinds: dict[tuple[str, int, int, int, int, float], list[tuple[StepCost, _Asked]]] = {}
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

    def _learn_costs(self, kind: str, batch: int, num_rows: int, steps: Seq[tuple[StepCost, _Asked]]) -> None:
        """Of steps of one kind."""
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

    def _learn_acceptance(self, number: int, outcomes: Seq[Outcome]) -> _Asked:
        """Of one step."""
        asked = _Asked()
        for outcome in outcomes:
            budget, sequence, draft = outcome.budget, outcome.sequence, outcome.draft
            if budget == 0:
                continue
            lag = self._pauses.lag(sequence, number)
            forget = PROBE_FORGETS if self._pauses.has_paused(sequence, number) else 1.0
            self._pauses.drafted(sequence, number)
            asked.count += 1
            asked.longest = max(asked.longest, budget)
            asked.rested += lag > 0
            asked.lag += lag
            drafted = min(draft.num_candidates, len(draft))
            self._acceptance.observe(sequence, budget, drafted, outcome.verdict.path, forget)
        return asked


def kind_of(sequences: Seq[Sequence]) -> str:
    """Of requests: what logits cost after the forward depends on it."""
    return "greedy" if all(sequence.params.greedy for sequence in sequences) else "drawn"
