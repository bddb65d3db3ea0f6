"""One engine run whose steps are priced by measured costs: its speed does not depend on noise.

The engine, its drafts and its verdicts are real. The time of each step is looked up in a cost model, and the policy
sees that, so that a run is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from forerun.config import MAX_NUM_DRAFT_TOKENS, OFF, EngineConfig, SamplingParams
from forerun.drafters import Drafter
from forerun.drafters.hybrid.hybrid import Hybrid
from forerun.engine import LLM
from forerun.engine.engine import Engine
from forerun.kv_cache import Unpaged
from forerun.models import Forward, LanguageModel, Rows, StandIn
from forerun.speculation import CostModel, DraftOutcome, DraftPlan, SpeculationPolicy, StepCost
from forerun.speculation.cost_model import KINDS
from forerun.types import Cache, Draft, Sequence as Tokens

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
        scratch = cache.scratch
        fed = cache.num_scratch
        parents = range(fed - 1, fed + len(rows.token_ids) - 1) if rows.parents is None else rows.parents
        for token_id, parent in zip(rows.token_ids, parents, strict=True):
            before = cache.length - 1 if parent < 0 else scratch[parent][1]
            position = before + 1 if parent < 0 or before >= 0 else -1
            on_text = 0 <= position < len(self.text) and self.text[position] == token_id
            scratch.append((int(token_id), position if on_text else -1))


class PricedPolicy(SpeculationPolicy):
    """A policy that observes the priced costs of each step in place of wall-clock times, and adds them up.

    Args:
        inner: decides.
        rows: seconds of a step by the target's rows, drafting apart.
        drafting: seconds in the drafter of a verified step.

    Attributes:
        seconds: of the verified steps so far.
        num_tokens: committed in them.
        num_steps, num_nodes, num_idle: verified steps, nodes proposed, steps without a draft.
    """

    def __init__(
        self, inner: SpeculationPolicy, rows: Sequence[float], drafting: Callable[[DraftOutcome], float]
    ) -> None:
        self._inner = inner
        self._rows = rows
        self._drafting = drafting
        self.seconds = 0.0
        self.num_tokens = self.num_steps = self.num_nodes = self.num_idle = 0

    def plan(self, sequences: Sequence[Tokens]) -> DraftPlan:
        return self._inner.plan(sequences)

    def beside_prompts(self, sequences: Sequence[Tokens]) -> DraftPlan:
        return self._inner.beside_prompts(sequences)

    def trim(self, plan: DraftPlan, sequences: Sequence[Tokens], drafts: Sequence[Draft]) -> DraftPlan:
        return self._inner.trim(plan, sequences, drafts)

    def observe(self, cost: StepCost, outcomes: Sequence[DraftOutcome]) -> None:
        drafting = target = 0.0
        for outcome in outcomes:
            nodes = len(outcome.draft)
            drafting = self._drafting(outcome)
            target = self._rows[min(nodes + 1, len(self._rows) - 1)]
            self.seconds += drafting + target
            self.num_tokens += len(outcome.verdict.path) + 1
            self.num_steps += 1
            self.num_nodes += nodes
            self.num_idle += outcome.num_draft_tokens == 0
        priced = replace(cost, time_draft=drafting, time_target=target, time_verify=0.0, time_rest=0.0)
        self._inner.observe(priced, outcomes)

    def stop(self, sequence: Tokens) -> None:
        self._inner.stop(sequence)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is replayed: a target, a way to make drafters, and the costs of both.

    Attributes:
        plain: an engine of the target alone.
        make: a fresh drafter, bound to the target.
        costs: of steps, and of drafts where the drafter is no hybrid, which knows its own.
        echo: the drafter does not read the target's rows, so that an EchoModel can take the target's place.
    """

    plain: LLM
    make: Callable[[], Drafter]
    costs: CostModel
    echo: bool = False

    @property
    def rows(self) -> list[float]:
        """Return the seconds of a step by the target's rows."""
        table = self.costs.target(KINDS[0], 1, 0)
        assert table is not None
        rows: list[float] = table.tolist()
        return rows

    @property
    def plain_speed(self) -> float:
        """Return the tokens per second of plain decoding."""
        return 1 / self.rows[1]

    def drafting(self, drafter: Drafter) -> Callable[[DraftOutcome], float]:
        """Return the seconds that a drafter takes for a step."""
        if isinstance(drafter, Hybrid):
            return lambda _: drafter.drafting_seconds
        table: list[float] = self.costs.draft(1, MAX_NUM_DRAFT_TOKENS).tolist()
        if drafter.traits.estimates:  # however many it is asked for
            return lambda outcome: table[4] if outcome.num_draft_tokens else table[0]
        followed: set[Tokens] = set()

        def seconds(outcome: DraftOutcome) -> float:
            is_asked = outcome.num_draft_tokens > 0
            made = max(len(outcome.draft), 1) if is_asked else 0  # as choosers learn it: chains may end early
            sequence = outcome.sequence
            lag = 0 if not is_asked or sequence in followed else len(sequence.token_ids)
            followed.update([sequence] * is_asked)
            return table[made] + self.costs.follow(min(lag, drafter.traits.follows or lag))

        return seconds


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
    drafter = setting.make()
    priced = PricedPolicy(policy, setting.rows, setting.drafting(drafter))
    plain = setting.plain
    config = EngineConfig(seed=0, prefix_reuse=OFF)
    echo = EchoModel(setting.plain.target)
    target = echo if texts else plain.target
    engine = Engine(target, drafter, tokenizer=plain.tokenizer, config=config, policy=priced)
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
