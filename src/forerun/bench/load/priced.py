"""An engine under load whose steps are priced by measured costs on a virtual clock.

As `priced_run`, for many requests at once: engine, drafts and verdicts are real, seconds are looked up. Everything that
decides by time reads the virtual clock, so that a run is deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forerun.bench.load.replay_costs import DrafterCosts, TargetCosts
from forerun.bench.priced_run import VirtualClock
from forerun.bench.wrapped_drafter import WrappedDrafter
from forerun.drafters import Drafter
from forerun.models import Forward, LanguageModel, Rows, StandIn
from forerun.policy import Budget, Outcome, Plan, StepCost
from forerun.types import Draft, Sequence as Tokens, Step


class PricedTarget(StandIn):
    """A model whose forwards move a clock.

    Attributes:
        seconds: of the last forward.
        sequences: in it.
        prompt_rows: in all forwards: rows of which no logits were wanted.
        prompt_seconds: by which these have lengthened the forwards.
    """

    def __init__(self, model: LanguageModel, costs: TargetCosts, clock: VirtualClock) -> None:
        super().__init__(model)
        self._costs, self._clock = costs, clock
        self.seconds, self.sequences = 0.0, 0
        self.prompt_rows, self.prompt_seconds = 0, 0.0

    def forward(self, batch: Sequence[Rows], layers: Sequence[int] = ()) -> Forward:
        """As `LanguageModel.forward`."""
        rows = sum(len(each.token_ids) for each in batch)
        context = sum(each.cache.length for each in batch)
        self.seconds, self.sequences = self._costs(len(batch), rows, context), len(batch)
        self._clock.now += self.seconds
        wanted = sum(each.num_wanted for each in batch)
        if wanted < rows:
            without = self._costs(len(batch), wanted, context) if wanted else 0.0
            self.prompt_rows += rows - wanted
            self.prompt_seconds += max(self.seconds - without, 0.0)
        return self.model.forward(batch, layers)


class PricedDrafter(WrappedDrafter):
    """A drafter whose work moves a clock.

    Attributes:
        seconds: of its work since somebody set this to 0.
    """

    def __init__(self, drafter: Drafter, costs: DrafterCosts, clock: VirtualClock) -> None:
        super().__init__(drafter)
        self._costs, self._clock = costs, clock
        self.seconds = 0.0

    def draft(self, sequences: Sequence[Tokens], budgets: Sequence[int], price: float = 0.0) -> list[Draft]:
        drafts = super().draft(sequences, budgets, price)
        asked = sum(budget > 0 for budget in budgets)
        if asked:  # the surface includes learning what became of the drafts, which `commit` adds
            longest = max(map(len, drafts))
            self._spend(max(self._costs.draft(asked, longest) - self._costs.idle(asked, 0), 0.0))
        return drafts

    def commit(self, steps: Sequence[Step]) -> None:
        super().commit(steps)
        told = sum(step.verdict is not None for step in steps)
        if told:
            self._spend(self._costs.idle(told, 0))

    def _spend(self, seconds: float) -> None:
        self.seconds += seconds
        self._clock.now += seconds


class PricedBudget(Budget):
    """A budget that is told the priced costs of each step.

    Args:
        inner: decides.
        costs: whose `rest` prices the engine's part.

    Attributes:
        num_steps, num_nodes, num_idle: steps of sequences, nodes proposed, steps of sequences with a budget of 0.
    """

    def __init__(
        self,
        inner: Budget,
        target: PricedTarget,
        drafter: PricedDrafter | None,
        costs: DrafterCosts,
        clock: VirtualClock,
    ) -> None:
        self._inner, self._target, self._drafter, self._costs, self._clock = inner, target, drafter, costs, clock
        self.num_steps = self.num_nodes = self.num_idle = 0

    def plan(self, sequences: Sequence[Tokens]) -> Plan:
        return self._inner.plan(sequences)

    def beside_prompts(self, sequences: Sequence[Tokens]) -> Plan:
        return self._inner.beside_prompts(sequences)

    def observe(self, cost: StepCost, outcomes: Sequence[Outcome]) -> None:
        nodes = sum(len(outcome.draft) for outcome in outcomes)
        sequences = self._target.sequences
        rest = self._costs.rest(sequences, nodes / max(sequences, 1))
        self._clock.now += rest
        drafting = 0.0
        if self._drafter is not None:
            drafting, self._drafter.seconds = self._drafter.seconds, 0.0
        self.num_steps += len(outcomes)
        self.num_nodes += nodes
        self.num_idle += sum(outcome.budget == 0 for outcome in outcomes)
        self._inner.observe(
            replace(cost, time_draft=drafting, time_target=self._target.seconds, time_verify=0.0, time_rest=rest),
            outcomes,
        )

    def stop(self, sequence: Tokens) -> None:
        self._inner.stop(sequence)
