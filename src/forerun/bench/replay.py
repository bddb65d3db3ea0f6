"""Fixed K against "auto" without a clock: real drafts and verdicts, priced by measured step costs.

Wall-clock comparisons of a few per cent drown in the noise of a shared machine. Here every run is made by the real
engine, so its acceptances are real, but what a step costs is looked up in a table (`step_costs`), and the automatic
budget is shown those costs in place of measured ones. Runs are then deterministic, and differ in nothing but K.
Requests carry seeds, so that every method writes the same text at every temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from forerun.bench.step_costs import Curve, DrafterCosts
from forerun.config import EngineConfig, SamplingParams
from forerun.drafters import Binding, make_drafter
from forerun.engine import LLM
from forerun.engine.budget import AutoBudget, Budget, FixedBudget, Outcome, Plan, StepCost
from forerun.engine.engine import Engine
from forerun.types import Drafter
from forerun.types import Sequence as Tokens

PLAIN_STEP = 0


@dataclass(frozen=True, slots=True)
class Costs:
    """What the steps of one drafter over one target cost at batch 1."""

    target: Curve
    drafter: DrafterCosts

    def step(self, budget: int, nodes: int) -> StepCost:
        """One verified draft of `nodes` nodes. A budget of 0: the drafter was not asked."""
        return StepCost(
            num_rows=nodes + 1,
            num_prompt_rows=0,
            num_sequences=1,
            context=0,
            budgets=[budget],
            time_draft=self.drafter.draft(nodes) if budget else self.drafter.idle,
            time_target=self.target(nodes + 1),
            time_verify=0.0,
            time_rest=self.drafter.rest(nodes),
        )


class Priced:
    """A budget that lives by the table: sees its costs, and adds up what the run would have taken.

    Attributes:
        seconds: so far.
        num_tokens: committed in verified steps so far.
        num_steps, num_nodes, num_idle: verified steps, nodes proposed, steps with a budget of 0.
    """

    def __init__(self, inner: Budget, costs: Costs) -> None:
        self._inner = inner
        self._costs = costs
        self.seconds = 0.0
        self.num_tokens = self.num_steps = self.num_nodes = self.num_idle = 0

    def plan(self, sequences: Sequence[Tokens]) -> Plan:
        return self._inner.plan(sequences)

    def observe(self, cost: StepCost, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            nodes = len(outcome.draft)
            priced = self._costs.step(outcome.budget, nodes)
            self.seconds += priced.time_draft + priced.time_target + priced.time_rest
            self.num_tokens += len(outcome.verdict.path) + 1
            self.num_steps += 1
            self.num_nodes += nodes
            self.num_idle += outcome.budget == 0
            self._inner.observe(replace(priced, context=cost.context), [outcome])
        if not outcomes:
            self._inner.observe(cost, outcomes)

    def stop(self, sequence: Tokens) -> None:
        self._inner.stop(sequence)


@dataclass(frozen=True, slots=True)
class Replayed:
    """One way of choosing K on one workload.

    Attributes:
        name: "K=4", or "auto".
        tokens_per_second: by the table.
        mean_acceptance_length: tokens per forward.
        mean_nodes: draft tokens per forward.
        idle: share of steps in which the drafter was not asked.
    """

    name: str
    tokens_per_second: float
    mean_acceptance_length: float
    mean_nodes: float
    idle: float


def replay(
    plain: LLM,
    make: Callable[[], Drafter],
    budget: Budget,
    name: str,
    costs: Costs,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
) -> Replayed:
    """One engine answers all prompts, one after the other, as a lone user would have it.

    Args:
        make: a fresh drafter, bound to the target.
        budget: a fresh one.
        params: one per prompt.
    """
    priced = Priced(budget, costs)
    config = EngineConfig(num_draft_tokens=1, seed=0)  # the budget decides; above 0 the drafter takes part
    engine = Engine(plain.target, make(), tokenizer=plain.tokenizer, config=config, budget=priced)
    for prompt, each in zip(prompts, params, strict=True):
        engine.add(list(prompt), each)
        while engine.has_work:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
    steps = max(1, priced.num_steps)
    return Replayed(
        name,
        priced.num_tokens / priced.seconds if priced.seconds else 0.0,
        priced.num_tokens / steps,
        priced.num_nodes / steps,
        priced.num_idle / steps,
    )


def plain_speed(costs: Costs) -> float:
    """Tokens per second of plain decoding by the same table: no drafter to keep warm."""
    return 1 / (costs.target(1) + costs.drafter.rest(PLAIN_STEP))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One drafter on one workload.

    Attributes:
        workload: what was run, for people.
        fixed: one entry per K.
        auto: K chosen automatically.
        plain: tokens per second of plain decoding.
    """

    workload: str
    fixed: list[Replayed]
    auto: Replayed
    plain: float

    @property
    def best(self) -> Replayed:
        """The best that a fixed choice could have been, plain decoding included."""
        plain = Replayed("plain", self.plain, 1.0, 0.0, 1.0)
        return max([plain, *self.fixed], key=lambda each: each.tokens_per_second)

    @property
    def best_over_plain(self) -> float:
        return self.best.tokens_per_second / self.plain

    @property
    def auto_over_plain(self) -> float:
        return self.auto.tokens_per_second / self.plain

    @property
    def auto_over_best(self) -> float:
        return self.auto.tokens_per_second / self.best.tokens_per_second


def compare(
    plain: LLM,
    make: Callable[[], Drafter],
    label: str,
    costs: Costs,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    counts: Sequence[int],
) -> Comparison:
    """Every K of `counts`, and auto."""
    runs = [replay(plain, make, FixedBudget(k), f"K={k}", costs, prompts, params) for k in counts]
    auto = replay(plain, make, AutoBudget(), "auto", costs, prompts, params)
    return Comparison(label, runs, auto, plain_speed(costs))


def fresh(plain: LLM, spec: str) -> Drafter:
    """A new drafter for the target of `plain`, with draws of its own that are the same each time."""
    drafter = make_drafter(spec, Binding(plain.target, plain.tokenizer, 1))
    assert drafter is not None
    return drafter
