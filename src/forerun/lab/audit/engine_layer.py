"""The layer *Engine*: real requests through cache, batch, drafts and rollback, counted against exact probabilities.

Every answer is a few tokens long. Which cell of its prompt's continuations it falls into is counted, and the counts
of a test's prompts are compared with what teacher forcing says. K varies from step to step, and requests come while
others are computed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from forerun.config import AUTO, LOSSY_RULES, MAX_SEED, EngineConfig, SamplingParams
from forerun.drafters import Drafter
from forerun.engine import Choice, Engine
from forerun.lab.audit.certificate import Check, Layer
from forerun.lab.audit.distributions import ContinuationCells, DrawnDrafts, Laws, Path
from forerun.lab.audit.settings import SAMPLED, Options, Sampled
from forerun.lab.audit.statistics import NOTHING, GTest, Numbers, deviation, g_test
from forerun.models import LanguageModel
from forerun.speculation import DraftPlan, FixedPolicy, SpeculationPolicy
from forerun.types import Sequence

# Requests through an engine that is driven here, step by step, so that arrival, K and price are the audit's.

_PRICE = 0.3
"""Above it a drafter's estimate of acceptance goes on; high enough that drafts end early now and then."""


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """One request."""

    prompt: Seq[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class AuditRun:
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

    def policy(self, seed: int) -> SpeculationPolicy:
        """K of each step."""
        if self.varying:
            return VaryingPolicy(self.num_draft_tokens, seed)
        return FixedPolicy(self.num_draft_tokens)


class VaryingPolicy(SpeculationPolicy):
    """K of every sequence and step drawn from 0 to the largest, and a price now and then. It never learns: exactness
    must not depend on what a budget decides, as long as it does not look at the tokens to come."""

    def __init__(self, most: int, seed: int) -> None:
        self._most = most
        self._random = random.Random(seed)

    def plan(self, sequences: Seq[Sequence]) -> DraftPlan:
        num_draft_tokens = [self._random.randint(0, self._most) if sequence.room > 0 else 0 for sequence in sequences]
        return DraftPlan(num_draft_tokens, self._random.choice((0.0, 0.0, _PRICE)))

    def beside_prompts(self, sequences: Seq[Sequence]) -> DraftPlan:
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
        self, asked: Seq[AuditRequest], run: AuditRun, seed: int, drafter: Drafter | None = None
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
            policy=run.policy(seed) if drafts else None,
        )
        try:
            return _drive(engine, asked, run.arrivals or len(asked))
        finally:
            engine.close()


def _drive(engine: Engine, asked: Seq[AuditRequest], arrivals: int) -> list[list[Choice] | Exception]:
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


NUM_TESTS = len(SAMPLED)
LENGTH = 6
"""Tokens of an answer: room for a draft, its rejection, and what comes after the rollback."""
NUM_OPENED = 48
"""Paths whose law is computed, of each prompt and test."""
_NUM_PROMPTS = 2
_CHOICES = 4
"""Of a request without a seed: they share the pages of their prompt."""
_RUN = AuditRun("requests", 5, 16, arrivals=2, varying=True, prefill_chunk=48)
_PLAIN = AuditRun("plain", 0, 16)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A test's prompts with their cells.

    Attributes:
        options: of the requests to each prompt.
    """

    known: dict[Path, ContinuationCells]
    options: dict[Path, Options]

    def asked(self, sampled: Sampled, num_requests: int, seed: int) -> list[AuditRequest]:
        """The requests, prompts in turn."""
        rng = random.Random(seed)
        found: list[AuditRequest] = []
        prompts = list(self.known)
        number = 0
        while number < num_requests:
            prompt = prompts[len(found) % len(prompts)]
            own: Options = {"seed": rng.randrange(MAX_SEED)} if sampled.is_seeded else {"n": _CHOICES}
            params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, **self.options[prompt], **own)
            found.append(AuditRequest(prompt, params))
            number += params.n
        return found


def engine_layer(
    audited: Audited,
    prompts: Seq[Seq[int]],
    num_requests: int,
    seed: int,
    level: float,
    acceptance: str | None = None,
    say: Callable[[str], None] = lambda _: None,
    grid: Seq[Sampled] = SAMPLED,
) -> Layer:
    """Answer and count.

    Args:
        num_requests: answers of all tests together.
        level: of each test.
        acceptance: the rule asked for.
        grid: the tests.
    """
    layer = Layer("Engine", "Real requests through cache, batch and rollback against exact probabilities.")
    if not audited.target.exactness.exact:
        layer.notes.append(
            "The model is not exact on this machine: probabilities differ in their last digits with what is computed "
            "together, which is far less than these tests can see. Filters, which make a cut of such a difference, are "
            "left out."
        )
    every = {tuple(prompt): Laws(audited.target, prompt) for prompt in prompts[:_NUM_PROMPTS]}
    try:
        for number, sampled in enumerate(grid):
            say(f"Engine: {sampled.name}")
            _test(audited, layer, sampled, every, num_requests // len(grid), seed + number, level, acceptance)
    finally:
        for laws in every.values():
            laws.close()
    return layer


def _test(
    audited: Audited,
    layer: Layer,
    sampled: Sampled,
    every: dict[Path, Laws],
    num_requests: int,
    seed: int,
    level: float,
    acceptance: str | None,
) -> None:
    prepared = prepare(audited, sampled, every)
    asked = prepared.asked(sampled, num_requests, seed)
    drafter = DrawnDrafts(prepared.known, every, seed ^ 0x5DEECE66D) if sampled.is_drawn else None
    answers = audited.answers(asked, _RUN, seed, drafter)
    drafted, accepted = num_drafted(answers)
    is_lossy = acceptance in LOSSY_RULES and not sampled.is_seeded
    counts = counted(prepared, asked, answers)
    if is_lossy:
        layer.tests.append(_measured(sampled.name, prepared, counts, drafted, accepted))
        return
    test = Check.of(sampled.name, compared(prepared, counts), level, num_drafted=drafted, num_accepted=accepted)
    if errors := broken(answers):
        test = replace(test, verdict="fail", note="; ".join(errors))
        layer.findings.append(f"{sampled.name}: {'; '.join(errors)}.")
    elif test.verdict == "fail":
        plain = audited.answers(asked, _PLAIN, seed)
        p_value = compared(prepared, counted(prepared, asked, plain)).p_value
        blame = "plain decoding deviates too" if p_value < level else f"plain decoding does not (p = {p_value:.2g})"
        layer.findings.append(f"{sampled.name}: answers do not follow the exact probabilities; {blame}.")
    elif not accepted or accepted == drafted:
        why = "nothing was drafted" if not drafted else "nothing was rejected" if accepted else "nothing was accepted"
        if not drafted:
            test = replace(test, verdict="inconclusive", note=why)
        else:
            layer.notes.append(f"{sampled.name}: {why}.")
    layer.tests.append(test)


def prepare(audited: Audited, sampled: Sampled, every: dict[Path, Laws]) -> Prepared:
    """Options and cells of a test."""
    known: dict[Path, ContinuationCells] = {}
    options: dict[Path, Options] = {}
    for prompt, laws in every.items():
        chosen = sampled.options(laws.law((), SamplingParams()))
        if not audited.target.exactness.exact:
            chosen = {name: value for name, value in chosen.items() if name not in ("top_k", "top_p")}
        params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, **chosen)
        ends = frozenset(params.stop_token_ids)
        known[prompt] = ContinuationCells(laws, params, LENGTH, NUM_OPENED, ends)
        options[prompt] = chosen
    return Prepared(known, options)


def counted(prepared: Prepared, asked: Seq[AuditRequest], answers: Seq[object]) -> dict[Path, Numbers]:
    """Of each prompt, how many answers fall into each cell. A failed request counts nowhere."""
    found: dict[Path, list[list[int]]] = {prompt: [] for prompt in prepared.known}
    for one, choices in zip(asked, answers, strict=True):
        if isinstance(choices, list):
            found[tuple(one.prompt)] += [choice.token_ids for choice in choices]
    return {prompt: prepared.known[prompt].counts(each) for prompt, each in found.items()}


def compared(prepared: Prepared, counts: dict[Path, Numbers]) -> GTest:
    """The test of all prompts together, each a stratum."""
    outcome = NOTHING
    for prompt, seen in counts.items():
        outcome += g_test(seen, prepared.known[prompt].probabilities)
    return outcome


def _measured(name: str, prepared: Prepared, counts: dict[Path, Numbers], num_drafted: int, num_accepted: int) -> Check:
    every = list(counts)
    totals = np.array([counts[prompt].sum() for prompt in every])
    cells = [
        prepared.known[prompt].probabilities * share
        for prompt, share in zip(every, totals / max(float(totals.sum()), 1.0), strict=True)
    ]
    seen = np.concatenate([counts[prompt] for prompt in every])
    found = deviation(seen, np.concatenate(cells))
    return Check(
        name,
        "measured",
        num_samples=int(seen.sum()),
        freedom=len(seen) - 1,
        deviation=found,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
    )
