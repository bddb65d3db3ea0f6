"""One engine run whose steps are priced by measured costs on a virtual clock: its speed does not depend on noise.

The engine, its drafts and its verdicts are real. The time of each step is looked up in cost curves
(`plan/step_times.py`), and whatever decides by time (the automatic budget, a hybrid) reads the virtual clock, so that a
run is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from forerun.bench.echo import EchoModel
from forerun.bench.wrapped_drafter import WrappedDrafter
from forerun.config import OFF, EngineConfig, SamplingParams
from forerun.drafters import Drafter
from forerun.engine import LLM
from forerun.engine.engine import Engine
from forerun.engine.stats import SequenceStats
from forerun.plan.step_times import CostCurve, DrafterCosts
from forerun.policy import Budget, Outcome, Plan, StepCost
from forerun.types import Draft, Sequence as Tokens, Step


@dataclass(slots=True)
class VirtualClock:
    """A clock that only the priced parts of a run move.

    Attributes:
        now: seconds since the run began.
    """

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class PricedDrafter(WrappedDrafter):
    """A drafter whose work moves a virtual clock by its measured costs.

    Args:
        drafter: bound to the target.
        costs: its measured costs.
        clock: the run's clock.
    """

    def __init__(self, drafter: Drafter, costs: DrafterCosts, clock: VirtualClock) -> None:
        super().__init__(drafter)
        self._costs = costs
        self._clock = clock

    def draft(self, sequences: Sequence[Tokens], budgets: Sequence[int], price: float = 0.0) -> list[Draft]:
        drafts = super().draft(sequences, budgets, price)
        for draft, budget in zip(drafts, budgets, strict=True):
            if budget:  # the curve includes learning what became of the draft, which `commit` adds
                self._clock.now += max(0.0, self._costs.draft(len(draft)) - self._costs.idle)
        return drafts

    def commit(self, steps: Sequence[Step]) -> None:
        super().commit(steps)
        self._clock.now += self._costs.idle * sum(step.verdict is not None for step in steps)


class PricedBudget(Budget):
    """A budget that is told the priced costs of each step, and adds them up.

    Args:
        inner: decides.
        target: seconds of a forward, by rows.
        rest: seconds of the engine's part of a step, by nodes.
        clock: the run's clock.
        taps: seconds by which each forward is longer for the drafter's sake.

    Attributes:
        seconds: of the verified steps so far; draft_seconds, target_seconds: of these.
        num_tokens: committed in them.
        num_steps, num_nodes, num_idle: verified steps, nodes proposed, steps with a budget of 0.
    """

    def __init__(
        self, inner: Budget, target: CostCurve, rest: CostCurve, clock: VirtualClock, taps: float = 0.0
    ) -> None:
        self._inner = inner
        self._taps = taps
        self._target = target
        self._rest = rest
        self._clock = clock
        self._observed = clock.now
        self.seconds = self.draft_seconds = self.target_seconds = 0.0
        self.num_tokens = self.num_steps = self.num_nodes = self.num_idle = 0

    def plan(self, sequences: Sequence[Tokens]) -> Plan:
        return self._inner.plan(sequences)

    def beside_prompts(self, sequences: Sequence[Tokens]) -> Plan:
        return self._inner.beside_prompts(sequences)

    def observe(self, cost: StepCost, outcomes: Sequence[Outcome]) -> None:
        drafting = self._clock.now - self._observed
        target = rest = 0.0
        for outcome in outcomes:
            nodes = len(outcome.draft)
            target, rest = self._target(nodes + 1) + self._taps, self._rest(nodes)
            self.seconds += drafting + target + rest
            self.draft_seconds += drafting
            self.target_seconds += target
            self.num_tokens += len(outcome.verdict.path) + 1
            self.num_steps += 1
            self.num_nodes += nodes
            self.num_idle += outcome.budget == 0
        self._clock.now += target + rest
        self._observed = self._clock.now
        priced = replace(cost, time_draft=drafting, time_target=target, time_verify=0.0, time_rest=rest)
        self._inner.observe(priced, outcomes)

    def stop(self, sequence: Tokens) -> None:
        self._inner.stop(sequence)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is replayed: a target, a way to make drafters, and the costs of both.

    Attributes:
        plain: an engine of the target alone.
        make: a fresh drafter, bound to the target, whose work moves the clock.
        target: seconds of a forward, by rows.
        rest: seconds of the engine's part of a step, by nodes.
        echo: the drafter does not read the target's rows, so that an EchoModel can take the target's place.
        taps: seconds by which each forward is longer where the drafter reads hidden states.
    """

    plain: LLM
    make: Callable[[VirtualClock], Drafter]
    target: CostCurve
    rest: CostCurve
    echo: bool = False
    taps: float = 0.0

    @property
    def plain_speed(self) -> float:
        """Tokens per second of plain decoding, without a drafter that learns."""
        return 1 / (self.target(1) + self.rest(0))


@dataclass(frozen=True, slots=True)
class PricedAnswer:
    """One answer of a run.

    Attributes:
        seconds: by the cost curves, without the prompt's; draft_seconds, target_seconds: of these.
        stats: as the engine counts them; its times are the clock's on the wall.
    """

    seconds: float
    draft_seconds: float
    target_seconds: float
    stats: SequenceStats


@dataclass(frozen=True, slots=True)
class PricedRun:
    """One way of choosing K on one workload.

    Attributes:
        name: "K=4", or "auto".
        tokens_per_second: by the cost curves.
        mean_acceptance_length: tokens per forward.
        mean_nodes: draft tokens per forward.
        idle: share of steps in which the drafter was not asked.
    """

    name: str
    tokens_per_second: float
    mean_acceptance_length: float
    mean_nodes: float
    idle: float


def priced_run(
    setting: Setting,
    budget: Budget,
    name: str,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    texts: Sequence[Sequence[int]] = (),
    told: Callable[[PricedAnswer], None] = lambda _: None,
) -> PricedRun:
    """One engine answers all prompts, one after the other.

    Args:
        budget: a fresh one.
        params: one per prompt.
        texts: prompts with the target's answers, where the setting has an echo.
        told: of each answer.

    Raises:
        Exception: what a request ended with.
    """
    clock = VirtualClock()
    priced = PricedBudget(budget, setting.target, setting.rest, clock, setting.taps)
    plain, config, echo = setting.plain, EngineConfig(seed=0, prefix_reuse=OFF), EchoModel(setting.plain.target)
    target = echo if texts else plain.target
    engine = Engine(target, setting.make(clock), tokenizer=plain.tokenizer, config=config, budget=priced)
    for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        if texts:
            echo.text = texts[number]
        engine.add(list(prompt), each)
        seconds, drafting, verifying = priced.seconds, priced.draft_seconds, priced.target_seconds
        while engine.has_work:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                if output.choice is not None:
                    answer = PricedAnswer(
                        priced.seconds - seconds,
                        priced.draft_seconds - drafting,
                        priced.target_seconds - verifying,
                        output.choice.stats,
                    )
                    told(answer)
    steps = max(1, priced.num_steps)
    return PricedRun(
        name,
        priced.num_tokens / priced.seconds if priced.seconds else 0.0,
        priced.num_tokens / steps,
        priced.num_nodes / steps,
        priced.num_idle / steps,
    )
