"""The layer *Engine*: real requests through cache, batch, drafts and rollback, counted against exact probabilities.

Every answer is a few tokens long. Which cell of its prompt's continuations it falls into is counted, and the counts
of a test's prompts are compared with what teacher forcing says. K varies from step to step, and requests come while
others are computed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import PurePath
from traceback import walk_tb

from forerun.config import AUTO, LOSSY_RULES, MAX_SEED, EngineConfig, SamplingParams
from forerun.drafters import Drafter
from forerun.engine import Choice, Engine
from forerun.errors import ForerunError
from forerun.lab.audit.certificate import Check, Layer
from forerun.lab.audit.distributions import ContinuationCells, DrawnDrafts, Path, TargetDistributions
from forerun.lab.audit.pace import Pace, in_time
from forerun.lab.audit.settings import SAMPLED, Sampled
from forerun.lab.audit.statistics import NOTHING, GTest, Numbers, g_test
from forerun.models import LanguageModel
from forerun.speculation import DraftPlan, FixedPolicy, SpeculationPolicy
from forerun.types import Sequence
from forerun.utils.foreign_errors import reason

_MIN_ACCEPTANCE_PROB = 0.3
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
        varying: K is drawn for each sequence and step, up to num_draft_tokens; some steps have a min_acceptance_prob.
        prefill_chunk: tokens of a prompt in one step.
    """

    name: str
    num_draft_tokens: int = 0
    batch: int = 1
    arrivals: int = 0
    varying: bool = False
    prefill_chunk: int = 256


class VaryingPolicy(SpeculationPolicy):
    """A policy that draws K of every sequence and step from 0 to the largest, and in some steps a min_acceptance_prob.

    It never learns: exactness must not depend on what a policy decides, as long as it does not look at future tokens.
    """

    def __init__(self, most: int, seed: int) -> None:
        self._most = most
        self._random = random.Random(seed)

    def plan(self, sequences: Seq[Sequence]) -> DraftPlan:
        counts = [self._random.randint(0, self._most) if sequence.room > 0 else 0 for sequence in sequences]
        return DraftPlan(counts, self._random.choice((0.0, 0.0, _MIN_ACCEPTANCE_PROB)))

    def beside_prompts(self, sequences: Seq[Sequence]) -> DraftPlan:
        return self.plan(sequences)


class Audited:
    """A target with a drafter, or without one, and engines of both.

    Args:
        acceptance: the rule requested; None takes the one that fits.
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
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self._acceptance = acceptance
        self._prefix_reuse = prefix_reuse

    def answers(
        self,
        requests: Seq[AuditRequest],
        run: AuditRun,
        seed: int,
        drafter: Drafter | None = None,
        pace: Pace | None = None,
    ) -> list[list[Choice] | Exception]:
        """Return the choices of each request, or the error that ended it; of the first ones where the time is up.

        Args:
            seed: of the engine's noise and of K.
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
        policy: SpeculationPolicy | None = None
        if run.num_draft_tokens:
            policy = VaryingPolicy(run.num_draft_tokens, seed) if run.varying else FixedPolicy(run.num_draft_tokens)
        engine = Engine(
            self.target,
            drafter if policy else None,
            tokenizer=self.tokenizer,
            config=config,
            policy=policy,
        )
        try:
            return _drive(engine, requests, run, pace or Pace())
        finally:
            engine.close()


def _drive(engine: Engine, requests: Seq[AuditRequest], run: AuditRun, pace: Pace) -> list[list[Choice] | Exception]:
    index_of: dict[int, int] = {}
    choices: list[list[Choice]] = [[] for _ in requests]
    errors: dict[int, Exception] = {}
    done: set[int] = set()
    added = under_way = 0
    most = run.batch + run.batch // 4 if pace.is_limited else sum(one.params.n for one in requests)  # some wait
    while (admits := added < len(requests) and not pace.is_over) or engine.has_work:
        for one in requests[added : added + (run.arrivals or len(requests))] if admits else ():
            if under_way and under_way + one.params.n > most:
                break
            index_of[engine.add(list(one.prompt), one.params)] = added
            added += 1
            under_way += one.params.n
        for output in engine.step():
            index = index_of[output.request_id]
            if output.error is not None:
                errors.setdefault(index, output.error)
            elif output.choice is not None:
                choices[index].append(output.choice)
            if index not in done and (index in errors or len(choices[index]) == requests[index].params.n):
                done.add(index)
                under_way -= requests[index].params.n
                pace.advance(len(done))
    every = [errors.get(index) or sorted(found, key=lambda choice: choice.index) for index, found in enumerate(choices)]
    return every[:added]


def num_drafted(answers: Seq[list[Choice] | Exception]) -> tuple[int, int]:
    """Count the draft tokens verified in all answers, and those accepted."""
    every = [choice.stats for found in answers if not isinstance(found, Exception) for choice in found]
    return sum(stats.num_draft_tokens for stats in every), sum(stats.num_accepted_tokens for stats in every)


def broken(answers: Seq[object]) -> list[str]:
    """Count the types of errors that ended requests; return a phrase for each."""
    counts: dict[str, int] = {}
    for found in answers:
        if isinstance(found, Exception):
            name = type(found).__name__
            counts[name] = counts.get(name, 0) + 1
    return [f"{count} requests ended with {name}" for name, count in counts.items()]


_FIRST_ERROR = "The first error: "


def note_first_error(layer: Layer, answers: Seq[object]) -> None:
    """Add the text of the first error that ended a request to the layer's notes, once, with the last line of the
    drafter's package that raised it."""
    error = next((found for found in answers if isinstance(found, Exception)), None)
    if error is None or any(note.startswith(_FIRST_ERROR) for note in layer.notes):
        return
    place = ""
    package = "forerun"
    for frame, line in walk_tb(error.__traceback__):
        name = frame.f_globals.get("__name__", "").partition(".")[0]
        package = name if package == "forerun" else package  # that of a foreign drafter is the first beside forerun
        if name == package and not (name == "forerun" and isinstance(error, ForerunError)):  # whose text tells enough
            place = f" ({PurePath(frame.f_code.co_filename).name}, line {line}, in {frame.f_code.co_name})"
    layer.notes.append(f"{_FIRST_ERROR}{reason(error)}{place}.")


LENGTH = 6
"""Tokens of an answer: enough for a draft, its rejection, and what comes after the rollback."""
NUM_OPENED = 48
"""Paths whose distribution is computed, of each prompt and test."""
OPENING_SHARE = 0.1
"""Of a test's time, which that may take."""
_WEIGHT = 1.8
"""Of a test's time, beside that of a comparison of bits."""
_NUM_PROMPTS = 2
_CHOICES = 4
"""Of a request without a seed: they share the pages of their prompt."""
_RUN = AuditRun("requests", 5, 16, arrivals=2, varying=True, prefill_chunk=48)
_PLAIN = AuditRun("plain", 0, 16)


def engine_weight(sampled: Sampled) -> float:
    """Return the weight of a test among the stages: seeded requests have one answer each."""
    return _WEIGHT * (1.5 if sampled.is_seeded else 1)


def engine_layer(
    audited: Audited,
    prompts: Seq[Seq[int]],
    num_requests: int,
    seed: int,
    level: float,
    acceptance: str | None = None,
    pace: Pace | None = None,
    grid: Seq[Sampled] = SAMPLED,
) -> Layer:
    """Run every test of the grid and check its answers.

    Args:
        num_requests: answers of all tests together.
        level: of each test.
        acceptance: the rule requested.
        grid: the tests.
    """
    layer = Layer("Engine", "Real requests through cache, batch and rollback against exact probabilities.")
    if not audited.target.exactness.exact:
        layer.notes.append(
            "The model is not exact on this machine: probabilities differ in their last digits with what is computed "
            "together, which is far less than these tests can see. Filters, which make a cut of such a difference, are "
            "left out."
        )
    pace = pace or Pace()
    every = {tuple(prompt): TargetDistributions(audited.target, prompt) for prompt in prompts[:_NUM_PROMPTS]}
    try:
        for number, sampled in enumerate(grid):
            _test(audited, layer, sampled, every, num_requests // len(grid), seed + number, level, acceptance, pace)
    finally:
        for distributions in every.values():
            distributions.close()
    return layer


def _test(
    audited: Audited,
    layer: Layer,
    sampled: Sampled,
    every: dict[Path, TargetDistributions],
    num_requests: int,
    seed: int,
    level: float,
    acceptance: str | None,
    pace: Pace,
) -> None:
    each = 1 if sampled.is_seeded else _CHOICES
    count = -(-num_requests // each)
    pace.begin(f"Engine: {sampled.name}", count, engine_weight(sampled))
    if pace.is_over:
        layer.tests.append(Check(sampled.name, "inconclusive", note=in_time(0, count)))
        return
    known = {
        prompt: _cells(audited, sampled, one, partial(pace.is_past, OPENING_SHARE * part / len(every)))
        for part, (prompt, one) in enumerate(every.items(), 1)
    }
    rng = random.Random(seed)
    requests = [
        AuditRequest(
            prompt,
            replace(known[prompt].params, seed=rng.randrange(MAX_SEED))
            if sampled.is_seeded
            else replace(known[prompt].params, n=_CHOICES),
        )
        for prompt in islice(cycle(known), count)
    ]
    drafter = DrawnDrafts(known, every, seed ^ 0x5DEECE66D) if sampled.is_drawn else None
    answers = audited.answers(requests, _RUN, seed, drafter, pace)
    requests = requests[: len(answers)]
    note = in_time(len(answers), count)
    drafted, accepted = num_drafted(answers)
    strata = _counted(known, requests, answers)
    if acceptance in LOSSY_RULES and not sampled.is_seeded:
        layer.tests.append(Check.measured(sampled.name, strata, num_drafted=drafted, num_accepted=accepted, note=note))
        return
    counts = {"num_drafted": drafted, "num_accepted": accepted, **({"note": note} if note else {})}
    test = Check.of(sampled.name, _compared(strata), level, **counts)
    if errors := broken(answers):
        test = replace(test, verdict="fail", note="; ".join(errors))
        layer.findings.append(f"{sampled.name}: {test.note}.")
        note_first_error(layer, answers)
    elif test.verdict == "fail":
        p_value = _compared(_counted(known, requests, audited.answers(requests, _PLAIN, seed))).p_value
        blame = "plain decoding deviates too" if p_value < level else f"plain decoding does not (p = {p_value:.2g})"
        layer.findings.append(f"{sampled.name}: answers do not follow the exact probabilities; {blame}.")
    elif not drafted:
        test = replace(test, verdict="inconclusive", note="nothing was drafted")
    elif accepted in (0, drafted):
        layer.notes.append(f"{sampled.name}: nothing was {'rejected' if accepted else 'accepted'}.")
    layer.tests.append(test)


def _cells(
    audited: Audited, sampled: Sampled, distributions: TargetDistributions, ended: Callable[[], bool]
) -> ContinuationCells:
    """Return the cells of a test's answers to one prompt."""
    options = sampled.options(distributions.probabilities((), SamplingParams()))
    if not audited.target.exactness.exact:
        options = {name: value for name, value in options.items() if name not in ("top_k", "top_p")}
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, **options)
    return ContinuationCells(distributions, params, NUM_OPENED, ended)


def _counted(
    known: dict[Path, ContinuationCells], requests: Seq[AuditRequest], answers: Seq[object]
) -> list[tuple[Numbers, Numbers]]:
    """Return, of each prompt, how many answers fall into each cell, and the cells' probabilities.

    A failed request counts nowhere.
    """
    found: dict[Path, list[list[int]]] = {prompt: [] for prompt in known}
    for request, choices in zip(requests, answers, strict=True):
        if isinstance(choices, list):
            found[tuple(request.prompt)] += [choice.token_ids for choice in choices]
    return [(known[prompt].counts(each), known[prompt].probabilities) for prompt, each in found.items()]


def _compared(strata: Seq[tuple[Numbers, Numbers]]) -> GTest:
    """Test all prompts together, each a stratum."""
    return sum((g_test(*stratum) for stratum in strata), NOTHING)
