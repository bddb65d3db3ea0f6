"""One engine run whose steps are priced by measured costs on a virtual clock: its speed does not depend on noise.

The engine, its drafts and its verdicts are real. The time of each step is looked up in cost curves
(`engine/step_times.py`), and whatever decides by time (the automatic policy, a hybrid) reads the virtual clock, so that
a run is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from forerun.config import OFF, EngineConfig, SamplingParams
from forerun.drafters import Drafter, Traits
from forerun.engine import LLM
from forerun.engine.engine import Engine
from forerun.engine.step_times import CostCurve, DrafterCosts
from forerun.kv_cache import Unpaged
from forerun.models import Forward, LanguageModel, Rows, StandIn
from forerun.speculation import DraftOutcome, DraftPlan, SpeculationPolicy, StepCost
from forerun.types import Cache, Draft, Needs, Pool, Sequence as Tokens, Step

_CERTAIN = 1000.0
"""Logit of the text's next token, above any noise that a seeded request adds."""


class EchoCache(Unpaged):
    """The tokens of a sequence in place of keys and values.

    Attributes:
        nbytes: bytes of keys and values, 0.
        tokens: of the committed positions.
        scratch: tokens fed since the last commit, and their positions in the text; -1 for a token that differs from the
            text, and for all below it.
    """

    nbytes = 0

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.scratch: list[tuple[int, int]] = []

    @property
    def length(self) -> int:
        """Return the number of committed positions."""
        return len(self.tokens)

    @property
    def num_scratch(self) -> int:
        """Return the number of rows fed since the last commit."""
        return len(self.scratch)

    def commit(self, path: Sequence[int]) -> None:
        """Keep these of the rows fed since the last commit, and drop the others."""
        self.tokens += [self.scratch[row][0] for row in path]
        self.scratch = []

    def drop(self, keep: int = 0) -> None:
        """Drop the rows fed since the last commit, but for the first `keep`."""
        del self.scratch[keep:]

    def truncate(self, length: int) -> None:
        """Keep the first `length` positions, and no scratch."""
        del self.tokens[length:]
        self.scratch = []

    def free(self) -> None:
        """Do nothing: no memory is held."""

    def fork(self, other: Cache, length: int) -> None:
        """Hold the first tokens of another."""
        assert isinstance(other, EchoCache)
        self.tokens = other.tokens[:length]


class EchoModel(StandIn):
    """A model whose most probable next token is the one in the text, and token 0 for rows that differ from the text.

    It stands for a target whose text is known: a greedy or seeded request has the same text with every drafter, so one
    that does not read the target's rows can be replayed against the text alone, with the same verdicts.

    Args:
        model: the one that wrote the texts.

    Attributes:
        text: of the only request that is in the engine now.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.text: Sequence[int] = []

    @property
    def pool(self) -> None:
        """Return None: its caches hold no pages."""

    def new_cache(self) -> EchoCache:
        """Create an empty cache for one sequence."""
        return EchoCache()

    def forward(self, batch: Sequence[Rows], layers: Sequence[int] = ()) -> Forward:
        """Return float32 logits and no hidden states, otherwise as `LanguageModel.forward`; caches are EchoCaches."""
        echoed: list[int] = []
        for rows in batch:
            cache = rows.cache
            assert isinstance(cache, EchoCache)
            self._feed(cache, rows)
            last = cache.scratch[cache.num_scratch - rows.num_wanted :]
            echoed.extend(self.text[position + 1] if 0 <= position < len(self.text) - 1 else 0 for _, position in last)
        logits = torch.zeros(len(echoed), self.vocab_size)
        logits[torch.arange(len(echoed)), torch.tensor(echoed, dtype=torch.int64)] = _CERTAIN
        return Forward(logits)

    def _feed(self, cache: EchoCache, rows: Rows) -> None:
        """Add the rows to the scratch."""
        scratch, fed = cache.scratch, cache.num_scratch
        parents = range(fed - 1, fed + len(rows.token_ids) - 1) if rows.parents is None else rows.parents
        for token_id, parent in zip(rows.token_ids, parents, strict=True):
            position = cache.length if parent < 0 else scratch[parent][1] + 1 if scratch[parent][1] >= 0 else -1
            on_text = 0 <= position < len(self.text) and self.text[position] == token_id
            scratch.append((int(token_id), position if on_text else -1))


@dataclass(slots=True)
class VirtualClock:
    """A clock that only the priced parts of a run move.

    Attributes:
        now: seconds since the run began.
    """

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class PricedDrafter(Drafter):
    """A drafter whose work moves a virtual clock by its measured costs.

    Args:
        drafter: does the work; bound to the target.
        costs: its measured costs.
        clock: the run's clock.
    """

    def __init__(self, drafter: Drafter, costs: DrafterCosts, clock: VirtualClock) -> None:
        self._drafter, self._costs, self._clock = drafter, costs, clock

    @property
    def needs(self) -> Needs:
        return self._drafter.needs

    @property
    def traits(self) -> Traits:
        return self._drafter.traits

    @property
    def nbytes(self) -> int:
        return self._drafter.nbytes

    @property
    def pools(self) -> tuple[Pool, ...]:
        return self._drafter.pools

    def start(self, sequence: Tokens) -> None:
        self._drafter.start(sequence)

    def draft(
        self, sequences: Sequence[Tokens], num_draft_tokens: Sequence[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        drafts = self._drafter.draft(sequences, num_draft_tokens, min_acceptance_prob)
        for draft, max_nodes in zip(drafts, num_draft_tokens, strict=True):
            if max_nodes:  # the curve includes learning what became of the draft, which `commit` adds
                self._clock.now += max(0.0, self._costs.draft(len(draft)) - self._costs.idle)
        return drafts

    def commit(self, steps: Sequence[Step]) -> None:
        self._drafter.commit(steps)
        self._clock.now += self._costs.idle * sum(step.verdict is not None for step in steps)

    def stop(self, sequence: Tokens) -> None:
        self._drafter.stop(sequence)

    def rewind(self, sequence: Tokens, length: int) -> None:
        self._drafter.rewind(sequence, length)

    def reset(self) -> None:
        self._drafter.reset()


class PricedPolicy(SpeculationPolicy):
    """A policy that observes the priced costs of each step in place of wall-clock times, and adds them up.

    Args:
        inner: decides.
        target: seconds of a forward, by rows.
        rest: seconds of the engine's part of a step, by nodes.
        clock: the run's clock.
        hidden_outputs: seconds by which each forward is longer for the drafter's sake.

    Attributes:
        seconds: of the verified steps so far.
        num_tokens: committed in them.
        num_steps, num_nodes, num_idle: verified steps, nodes proposed, steps without a draft.
    """

    def __init__(
        self,
        inner: SpeculationPolicy,
        target: CostCurve,
        rest: CostCurve,
        clock: VirtualClock,
        hidden_outputs: float = 0.0,
    ) -> None:
        self._inner, self._target, self._rest, self._clock = inner, target, rest, clock
        self._hidden_outputs = hidden_outputs
        self._observed = clock.now
        self.seconds = 0.0
        self.num_tokens = self.num_steps = self.num_nodes = self.num_idle = 0

    def plan(self, sequences: Sequence[Tokens]) -> DraftPlan:
        return self._inner.plan(sequences)

    def beside_prompts(self, sequences: Sequence[Tokens]) -> DraftPlan:
        return self._inner.beside_prompts(sequences)

    def trim(self, plan: DraftPlan, sequences: Sequence[Tokens], drafts: Sequence[Draft]) -> DraftPlan:
        return self._inner.trim(plan, sequences, drafts)

    def observe(self, cost: StepCost, outcomes: Sequence[DraftOutcome]) -> None:
        drafting = self._clock.now - self._observed
        target = rest = 0.0
        for outcome in outcomes:
            nodes = len(outcome.draft)
            target, rest = self._target(nodes + 1) + self._hidden_outputs, self._rest(nodes)
            self.seconds += drafting + target + rest
            self.num_tokens += len(outcome.verdict.path) + 1
            self.num_steps += 1
            self.num_nodes += nodes
            self.num_idle += outcome.num_draft_tokens == 0
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
        hidden_outputs: seconds by which each forward is longer where the drafter reads hidden states.
    """

    plain: LLM
    make: Callable[[VirtualClock], Drafter]
    target: CostCurve
    rest: CostCurve
    echo: bool = False
    hidden_outputs: float = 0.0

    @property
    def plain_speed(self) -> float:
        """Return the tokens per second of plain decoding."""
        return 1 / (self.target(1) + self.rest(0))


@dataclass(frozen=True, slots=True)
class PricedRun:
    """One way of choosing K on one workload.

    Attributes:
        name: "K=4", or "auto".
        tokens_per_second: by the cost curves.
        mean_acceptance_length: tokens per forward.
        mean_nodes: draft tokens per forward.
        idle: share of steps without a draft.
    """

    name: str
    tokens_per_second: float
    mean_acceptance_length: float
    mean_nodes: float
    idle: float


def priced_run(
    setting: Setting,
    policy: SpeculationPolicy,
    name: str,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    texts: Sequence[Sequence[int]] = (),
) -> PricedRun:
    """Answer all prompts with one engine, one after the other.

    Args:
        policy: a fresh one.
        params: one per prompt.
        texts: prompts with the target's answers, where the setting has an echo.

    Raises:
        Exception: what a request ended with.
    """
    clock = VirtualClock()
    priced = PricedPolicy(policy, setting.target, setting.rest, clock, setting.hidden_outputs)
    plain, config, echo = setting.plain, EngineConfig(seed=0, prefix_reuse=OFF), EchoModel(setting.plain.target)
    target = echo if texts else plain.target
    engine = Engine(target, setting.make(clock), tokenizer=plain.tokenizer, config=config, policy=priced)
    for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        if texts:
            echo.text = texts[number]
        engine.add(list(prompt), each)
        while engine.has_work:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
    steps = max(1, priced.num_steps)
    return PricedRun(
        name,
        priced.num_tokens / priced.seconds if priced.seconds else 0.0,
        priced.num_tokens / steps,
        priced.num_nodes / steps,
        priced.num_idle / steps,
    )
