"""Fixed K against "auto" without a clock: real drafts and verdicts, priced by measured step costs.

Wall-clock comparisons of a few per cent drown in the noise of a shared machine. Here every run is made by the real
engine, so its acceptances are real, but what its parts cost is looked up in tables (`step_costs`), and whatever decides
by time (the automatic budget, a hybrid) sees a virtual clock. Runs are then deterministic, and differ in nothing but K.
Requests carry seeds, so that every method writes the same text at every temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.bench.echo import EchoModel
from forerun.bench.step_costs import Curve, DrafterCosts
from forerun.config import AUTO, HYBRID_MODES, HYBRID_SOURCES, EngineConfig, SamplingParams
from forerun.drafters import Binding, Drafter, Traits, make_drafter
from forerun.drafters.hybrid import Hybrid
from forerun.drafters.spec import split_spec
from forerun.engine import LLM
from forerun.engine.automatic import automatic_budget
from forerun.engine.budget import Budget, FixedBudget, Outcome, Plan, StepCost
from forerun.engine.engine import Engine
from forerun.types import Draft, Needs, Step
from forerun.types import Sequence as Tokens

HYBRID = "hybrid"


@dataclass(slots=True)
class VirtualClock:
    """Seconds that a run would have taken so far."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Charged(Drafter):
    """A drafter whose work moves a virtual clock on by what it costs according to a table."""

    def __init__(self, drafter: Drafter, costs: DrafterCosts, clock: VirtualClock) -> None:
        self._drafter = drafter
        self._costs = costs
        self._clock = clock

    @property
    def needs(self) -> Needs:
        return self._drafter.needs

    @property
    def traits(self) -> Traits:
        return self._drafter.traits

    @property
    def nbytes(self) -> int:
        return self._drafter.nbytes

    def rewind(self, sequence: Tokens, length: int) -> None:
        self._drafter.rewind(sequence, length)

    def start(self, sequence: Tokens) -> None:
        self._drafter.start(sequence)

    def stop(self, sequence: Tokens) -> None:
        self._drafter.stop(sequence)

    def draft(self, sequences: Sequence[Tokens], budgets: Sequence[int], price: float = 0.0) -> list[Draft]:
        drafts = self._drafter.draft(sequences, budgets, price)
        for draft, budget in zip(drafts, budgets, strict=True):
            if budget:  # the curve holds learning what became of the draft as well
                self._clock.now += max(0.0, self._costs.draft(len(draft)) - self._costs.idle)
        return drafts

    def commit(self, steps: Sequence[Step]) -> None:
        self._drafter.commit(steps)
        self._clock.now += self._costs.idle * sum(step.verdict is not None for step in steps)


class Priced:
    """A budget that lives by tables: it sees their costs, and adds up what the run would have taken.

    Attributes:
        seconds: of verified steps so far.
        num_tokens: committed in them.
        num_steps, num_nodes, num_idle: verified steps, nodes proposed, steps with a budget of 0.
    """

    def __init__(self, inner: Budget, target: Curve, rest: Curve, clock: VirtualClock) -> None:
        self._inner = inner
        self._target = target
        self._rest = rest
        self._clock = clock
        self._observed = clock.now
        self.seconds = 0.0
        self.num_tokens = self.num_steps = self.num_nodes = self.num_idle = 0

    def plan(self, sequences: Sequence[Tokens]) -> Plan:
        return self._inner.plan(sequences)

    def observe(self, cost: StepCost, outcomes: Sequence[Outcome]) -> None:
        drafting = self._clock.now - self._observed
        target = rest = 0.0
        for outcome in outcomes:
            nodes = len(outcome.draft)
            target, rest = self._target(nodes + 1), self._rest(nodes)
            self.seconds += drafting + target + rest
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
    """What is replayed: a target, a way to make drafters, and what both cost.

    Attributes:
        plain: an engine of the target alone.
        make: a fresh drafter, bound to the target, whose work moves the clock.
        target: seconds of a forward, by rows.
        rest: seconds of the engine's own, by nodes.
        echo: the drafter does not look at the target's rows: texts are known, and the target need not run (`echo`).
    """

    plain: LLM
    make: Callable[[VirtualClock], Drafter]
    target: Curve
    rest: Curve
    echo: bool = False

    @property
    def plain_speed(self) -> float:
        """Tokens per second of plain decoding: no drafter to keep warm."""
        return 1 / (self.target(1) + self.rest(0))


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
    setting: Setting,
    budget: Budget,
    name: str,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    texts: Sequence[Sequence[int]] = (),
) -> Replayed:
    """One engine answers all prompts, one after the other, as a lone user would have it.

    Args:
        budget: a fresh one.
        params: one per prompt.
        texts: prompts with the target's answers, where the setting has an echo.
    """
    clock = VirtualClock()
    priced = Priced(budget, setting.target, setting.rest, clock)
    config = EngineConfig(num_draft_tokens=1, seed=0)  # the budget decides; above 0 the drafter takes part
    plain = setting.plain
    echo: Any = EchoModel(plain.target) if texts else plain.target
    engine = Engine(echo, setting.make(clock), tokenizer=plain.tokenizer, config=config, budget=priced)
    for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        if texts:
            echo.text = texts[number]
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
    setting: Setting,
    label: str,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    counts: Sequence[int],
) -> Comparison:
    """Every K of `counts`, and auto."""
    texts = answers(setting.plain, prompts, params) if setting.echo else []
    runs = [replay(setting, FixedBudget(k), f"K={k}", prompts, params, texts) for k in counts]
    drafter = setting.make(VirtualClock())
    budget = automatic_budget(setting.plain.target, drafter, stored=False)
    auto = replay(setting, budget, AUTO, prompts, params, texts)
    return Comparison(label, runs, auto, setting.plain_speed)


def answers(plain: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    """Prompts with what the target says to them; predictions, which alter nothing, are left out."""
    generations: Any = plain.generate(
        [list(prompt) for prompt in prompts], [replace(p, prediction=None) for p in params]
    )
    return [[*prompt, *each.token_ids] for prompt, each in zip(prompts, generations, strict=True)]


def sources_of(spec: str) -> tuple[list[str], str]:
    """The drafters of a hybrid, or the one drafter that it is, and how a hybrid combines them."""
    name, options = split_spec(spec)
    if name != HYBRID:
        return [spec], ""
    return options.get("sources", HYBRID_SOURCES).split("+"), options.get("mode", HYBRID_MODES[0])


def fresh(plain: LLM, spec: str) -> Drafter:
    """A new drafter for the target of `plain`, with draws of its own that are the same each time."""
    return make_drafter(spec, Binding(plain.target, plain.tokenizer, 1))[0]


def charged(plain: LLM, spec: str, costs: Mapping[str, DrafterCosts], clock: VirtualClock) -> Drafter:
    """The same, moving a clock. costs: of the drafter, or of each source of a hybrid."""
    sources, mode = sources_of(spec)
    parts: list[Drafter] = [Charged(fresh(plain, source), costs[source], clock) for source in sources]
    return Hybrid(parts, mode, sources, clock) if mode else parts[0]
