"""Requests through an engine that is driven here, step by step, so that arrival, K and price are the audit's."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.config import AUTO, EngineConfig, SamplingParams
from forerun.drafters import Drafter
from forerun.engine import Choice, Engine
from forerun.models import LanguageModel
from forerun.policy import Budget, FixedBudget, Plan
from forerun.types import Sequence

_PRICE = 0.3
"""Above it a drafter's estimate of acceptance goes on; high enough that drafts end early now and then."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    prompt: Seq[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Run:
    """How requests are computed.

    Attributes:
        name: in reports.
        num_draft_tokens: K; 0 is plain decoding.
        batch: sequences at a time.
        arrivals: requests that enter before each step, while others are computed; 0: all enter at once.
        varying: K is drawn for each sequence and step, up to num_draft_tokens, and now and then drafts have a price.
        prefill_chunk: tokens of a prompt in one step.
    """

    name: str
    num_draft_tokens: int = 0
    batch: int = 1
    arrivals: int = 0
    varying: bool = False
    prefill_chunk: int = 256

    def budget(self, seed: int) -> Budget:
        """K of each step."""
        if self.varying:
            return VaryingBudget(self.num_draft_tokens, seed)
        return FixedBudget(self.num_draft_tokens)


class VaryingBudget(Budget):
    """K of every sequence and step drawn from 0 to the largest, and a price now and then. It never learns: exactness
    must not depend on what a budget decides, as long as it does not look at the tokens to come."""

    def __init__(self, most: int, seed: int) -> None:
        self._most = most
        self._random = random.Random(seed)

    def plan(self, sequences: Seq[Sequence]) -> Plan:
        budgets = [self._random.randint(0, self._most) if sequence.room > 0 else 0 for sequence in sequences]
        return Plan(budgets, self._random.choice((0.0, 0.0, _PRICE)))

    def beside_prompts(self, sequences: Seq[Sequence]) -> Plan:
        return self.plan(sequences)


class Audited:
    """A target with a drafter, or without one, and engines of both.

    Args:
        acceptance: the rule asked for; None takes the one that fits.
        prefix_reuse: as of the engine.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None,
        tokenizer: object,
        acceptance: str | None = None,
        prefix_reuse: str = AUTO,
    ) -> None:
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self._acceptance, self._prefix_reuse = acceptance, prefix_reuse

    def answers(
        self, asked: Seq[Asked], run: Run, seed: int, drafter: Drafter | None = None
    ) -> list[list[Choice] | Exception]:
        """The choices of each request, or the error that ended it.

        Args:
            seed: of the engine's noise and of the run's budget.
            drafter: in place of the audited one.
        """
        drafter = drafter or self.drafter
        config = EngineConfig(
            num_draft_tokens=run.num_draft_tokens,
            max_batch=run.batch,
            prefill_chunk=run.prefill_chunk,
            acceptance=self._acceptance,
            prefix_reuse=self._prefix_reuse,
            seed=seed,
        )
        drafts = run.num_draft_tokens > 0
        engine = Engine(
            self.target,
            drafter if drafts else None,
            tokenizer=self.tokenizer,
            config=config,
            budget=run.budget(seed) if drafts else None,
        )
        try:
            return _drive(engine, asked, run.arrivals or len(asked))
        finally:
            engine.close()


def _drive(engine: Engine, asked: Seq[Asked], arrivals: int) -> list[list[Choice] | Exception]:
    index_of: dict[int, int] = {}
    choices: list[list[Choice]] = [[] for _ in asked]
    errors: dict[int, Exception] = {}
    added = 0
    while added < len(asked) or engine.has_work:
        for one in asked[added : added + arrivals]:
            index_of[engine.add(list(one.prompt), one.params)] = added
            added += 1
        for output in engine.step():
            index = index_of[output.request_id]
            if output.error is not None:
                errors.setdefault(index, output.error)
            elif output.choice is not None:
                choices[index].append(output.choice)
    return [errors.get(index) or sorted(found, key=lambda choice: choice.index) for index, found in enumerate(choices)]


def num_drafted(answers: Seq[list[Choice] | Exception]) -> tuple[int, int]:
    """Draft tokens verified in all answers, and those accepted."""
    every = [choice.stats for found in answers if not isinstance(found, Exception) for choice in found]
    return sum(stats.num_draft_tokens for stats in every), sum(stats.num_accepted_tokens for stats in every)


def broken(answers: Seq[list[Choice] | Exception]) -> list[str]:
    """The kinds of errors that ended requests, with their numbers."""
    counts: dict[str, int] = {}
    for found in answers:
        if isinstance(found, Exception):
            name = type(found).__name__
            counts[name] = counts.get(name, 0) + 1
    return [f"{count} requests ended with {name}" for name, count in counts.items()]
