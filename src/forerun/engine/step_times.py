"""Measured times of a step's parts at batch 1: replays compute whole generations from them, the predictor a step."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from forerun.config import OFF, EngineConfig, SamplingParams
from forerun.drafters import Drafter
from forerun.engine.engine import Engine
from forerun.engine.stats import StepStats
from forerun.models import LanguageModel, Rows, identity
from forerun.speculation import FixedPolicy
from forerun.speculation.cost_model import KINDS, Table
from forerun.speculation.cost_store import forward_costs
from forerun.speculation.predictor import StepCosts

ROWS = (1, 2, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Rows of a forward at which the target is timed; times between them are interpolated."""
MIN_SAMPLES = 2
"""Samples that a count needs for its median to be a point of the curve."""


STEP_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds as a function of a count: linear between the points, constant beyond them."""

    counts: Sequence[float]
    seconds: Sequence[float]

    def __call__(self, count: float) -> float:
        return float(np.interp(count, self.counts, self.seconds))

    @classmethod
    def of_medians(cls, samples: Mapping[int, Sequence[float]]) -> CostCurve:
        """Make a curve through the medians of counts with MIN_SAMPLES samples; of all counts, if none has so many."""
        kept = {count: seconds for count, seconds in samples.items() if len(seconds) >= MIN_SAMPLES} or samples
        if not kept:
            return cls([0], [0.0])
        counts = sorted(kept)
        return cls(counts, [statistics.median(kept[count]) for count in counts])


@dataclass(frozen=True, slots=True)
class DrafterCosts:
    """A drafter's time in one step, in seconds by the number of nodes that it proposed.

    Attributes:
        draft: of a step that drafts: drafting, and learning the verdict.
        idle: of a step at K = 0: learning the verdict alone.
        rest: the engine's part of the step: distributions, verification, commits, text.
        hidden_outputs: by which the target's forward is longer, where the drafter reads its hidden states.
    """

    draft: CostCurve
    idle: float
    rest: CostCurve
    hidden_outputs: float = 0.0


def target_costs(model: LanguageModel, context: int, rounds: int, rows: Sequence[int] = ROWS) -> CostCurve:
    """Measure the seconds of a forward by its rows, after `context` cached positions: medians of interleaved rounds."""
    samples = _timed_forwards(model, context, [*rows] * (rounds + 1))
    return CostCurve.of_medians({count: seconds[1:] for count, seconds in samples.items()})


def _timed_forwards(
    model: LanguageModel, context: int, counts: Sequence[int], most_seconds: float = math.inf
) -> dict[int, list[float]]:
    """Time forwards of so many rows, one after the other, after `context` cached positions, until so many seconds are
    over. Returns the seconds by rows."""
    cache = model.new_cache()
    filler = [i % model.vocab_size for i in range(max(context, *counts))]
    model.forward([Rows(cache, filler[:context], num_logits=1)])
    cache.commit(range(context))
    samples: dict[int, list[float]] = defaultdict(list)
    begin = perf_counter()
    for count in counts:
        start = perf_counter()
        model.forward([Rows(cache, filler[:count])])
        samples[count].append(perf_counter() - start)
        cache.drop()
        if perf_counter() - begin > most_seconds:
            break
    cache.free()
    return samples


CALIBRATION_ROWS = (1, 5, 2, 3, 8, 4, 6, 12, 16, 32)
"""Rows of the forwards that are timed before the first request, the most telling first."""
CALIBRATION_CONTEXT = 16
"""Positions before them: what further ones cost is learned."""
CALIBRATION_SECONDS = 1.5
"""Time for this, once for a model, its number format, the number of threads and the machine."""
CALIBRATION_ROUNDS = 5


def calibrate(target: LanguageModel) -> Table:
    """Time forwards of a few row counts, unless that was done before, so that automatic policies which are made from
    now on know what rows cost. Large models have time for fewer counts; the others are interpolated.

    Returns:
        Seconds of a forward by its rows.
    """
    stored = forward_costs(identity(target))
    known = stored.costs.target(KINDS[0], 1, CALIBRATION_CONTEXT)
    if known is None:
        counts = CALIBRATION_ROWS * CALIBRATION_ROUNDS
        samples = _timed_forwards(target, CALIBRATION_CONTEXT, counts, CALIBRATION_SECONDS)
        for count, seconds in sorted(samples.items()):
            stored.costs.add_target(KINDS[0], 1, CALIBRATION_CONTEXT, count, statistics.median(seconds), len(seconds))
        stored.save()
        known = stored.costs.target(KINDS[0], 1, CALIBRATION_CONTEXT)
        assert known is not None
    return known


def drafter_costs(
    target: LanguageModel,
    tokenizer: Any,
    make: Callable[[], Drafter],
    num_draft_tokens: Sequence[int],
    prompt: Sequence[int],
    params: SamplingParams,
) -> DrafterCosts:
    """Measure a drafter in one generation at each K of `num_draft_tokens` and one at K = 0: medians by nodes proposed.

    Args:
        make: a fresh drafter, bound to the target.
    """
    draft: dict[int, list[float]] = defaultdict(list)
    rest: dict[int, list[float]] = defaultdict(list)
    idle: list[float] = []
    beside: list[float] = []
    for k in (0, *num_draft_tokens):
        drafter = make()
        # at K = 0 the drafter still learns what was committed, and that time is measured
        for step in verified_steps(target, tokenizer, drafter, k, prompt, params):
            rest[step.num_draft_tokens].append(step.time_total - step.time_draft - step.time_target)
            (draft[step.num_draft_tokens] if k else idle).append(step.time_draft)
            if not k:
                beside.append(step.time_target)
    hidden_outputs = 0.0
    if drafter.needs.layers:
        alone = [step.time_target for step in verified_steps(target, tokenizer, None, 0, prompt, params)]
        hidden_outputs = max(0.0, statistics.median(beside) - statistics.median(alone))
    return DrafterCosts(
        CostCurve.of_medians(draft), statistics.median(idle), CostCurve.of_medians(rest), hidden_outputs
    )


def step_costs(
    target: LanguageModel,
    tokenizer: Any,
    make: Callable[[], Drafter],
    most: int,
    prompt: Sequence[int],
    params: SamplingParams,
    rounds: int = STEP_ROUNDS,
) -> StepCosts:
    """Measure steps with chains of 0 to `most` tokens, and without a drafter: the median step of real generations, in
    the fastest of a few rounds.

    They include all that the engine does around a drafter: hidden states that the forward returns, the report to the
    drafter, and the rollback of caches after a rejection.

    Args:
        make: a fresh drafter, bound to the target.
    """
    counts = list(range(most + 1))
    plain: list[float] = []
    parts: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in ("target", "draft", "rest")}
    drafter = make()
    for _ in range(rounds):  # in turn, since machines drift
        alone = verified_steps(target, tokenizer, None, 0, prompt, params)
        plain.append(statistics.median(step.time_total for step in alone))
        for num_draft_tokens in counts:
            steps = list(verified_steps(target, tokenizer, drafter, num_draft_tokens, prompt, params))
            whole = [
                step for step in steps if step.num_draft_tokens == num_draft_tokens
            ]  # drafts near the end, or of unsure drafters, are shorter
            if whole:
                typical = sorted(whole, key=lambda step: step.time_total)[len(whole) // 2]
                parts["target"][num_draft_tokens].append(typical.time_target)
                parts["draft"][num_draft_tokens].append(typical.time_draft)
                parts["rest"][num_draft_tokens].append(typical.time_total - typical.time_draft - typical.time_target)
    curves = {name: _of_fastest(parts, name) for name in parts}
    return StepCosts(min(plain), *([curve(count) for count in counts] for curve in curves.values()))


def _of_fastest(parts: Mapping[str, Mapping[int, Sequence[float]]], name: str) -> CostCurve:
    """Return one part of the step of each count, in the round in which the whole step was the fastest. Other rounds
    hold time that other programs took."""
    counts = sorted(parts[name])
    chosen = []
    for count in counts:
        whole = [sum(each) for each in zip(*(part[count] for part in parts.values()), strict=True)]
        chosen.append(parts[name][count][whole.index(min(whole))])
    return CostCurve(counts, chosen)


def verified_steps(
    target: LanguageModel,
    tokenizer: Any,
    drafter: Drafter | None,
    num_draft_tokens: int,
    prompt: Sequence[int],
    params: SamplingParams,
) -> Iterator[StepStats]:
    """Yield the steps of one generation that gave tokens, at a fixed K.

    Raises:
        Exception: what the request ended with.
    """
    fixed, config = FixedPolicy(num_draft_tokens), EngineConfig(seed=0, prefix_reuse=OFF)
    engine = Engine(target, drafter, tokenizer=tokenizer, config=config, policy=None if drafter is None else fixed)
    engine.add(list(prompt), params)
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise output.error
        if engine.last_step.num_tokens:
            yield engine.last_step
