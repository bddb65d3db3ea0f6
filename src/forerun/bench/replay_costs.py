"""Times of a step's parts at batch 1, measured once, by which a replay prices whole generations."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from forerun.config import OFF, EngineConfig, SamplingParams
from forerun.drafters import Drafter
from forerun.engine import LLM
from forerun.engine.engine import Engine
from forerun.models import LanguageModel, Rows
from forerun.policy import FixedBudget

ROWS = (1, 2, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Rows of a forward at which the target is timed; times between them are interpolated."""
MIN_SAMPLES = 2
"""Samples that a count needs for its median to be a point of the curve."""


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds as a function of a count: linear between the points, constant beyond them."""

    counts: Sequence[float]
    seconds: Sequence[float]

    def __call__(self, count: float) -> float:
        return float(np.interp(count, self.counts, self.seconds))

    @classmethod
    def of_medians(cls, samples: Mapping[int, Sequence[float]]) -> CostCurve:
        """Through the median of each count with MIN_SAMPLES samples (of every count, if none has so many)."""
        kept = {count: seconds for count, seconds in samples.items() if len(seconds) >= MIN_SAMPLES} or samples
        if not kept:
            return cls([0], [0.0])
        counts = sorted(kept)
        return cls(counts, [statistics.median(kept[count]) for count in counts])


@dataclass(frozen=True, slots=True)
class DrafterCosts:
    """A drafter's time in one step, in seconds by the number of nodes it proposed.

    Attributes:
        draft: where it was asked: drafting, and learning what became of the draft.
        idle: where it was not asked: learning alone.
        rest: the engine's part of the step: distributions, verification, commits, text.
    """

    draft: CostCurve
    idle: float
    rest: CostCurve


def target_costs(model: LanguageModel, context: int, rounds: int, rows: Sequence[int] = ROWS) -> CostCurve:
    """Seconds of one forward by its rows, after `context` cached positions; rounds interleaved, medians."""
    cache = model.new_cache()
    filler = [i % model.vocab_size for i in range(context)]
    model.forward([Rows(cache, filler, num_logits=1)])
    cache.commit(range(context))
    samples: dict[int, list[float]] = defaultdict(list)
    for count in [*rows, *(count for _ in range(rounds) for count in rows)]:
        start = perf_counter()
        model.forward([Rows(cache, filler[:count])])
        samples[count].append(perf_counter() - start)
        cache.drop()
    cache.free()
    return CostCurve.of_medians({count: seconds[1:] for count, seconds in samples.items()})


def drafter_costs(
    plain: LLM, make: Callable[[], Drafter], budgets: Sequence[int], prompt: Sequence[int], params: SamplingParams
) -> DrafterCosts:
    """Medians by nodes proposed, of one generation at each fixed budget, and of one at a budget of 0.

    Args:
        make: a fresh drafter, bound to the target.
    """
    draft: dict[int, list[float]] = defaultdict(list)
    rest: dict[int, list[float]] = defaultdict(list)
    idle: list[float] = []
    for budget in (0, *budgets):
        # at a budget of 0 the drafter still learns what was committed, and that time is measured
        fixed, config = FixedBudget(budget), EngineConfig(seed=0, prefix_reuse=OFF)
        engine = Engine(plain.target, make(), tokenizer=plain.tokenizer, config=config, budget=fixed)
        engine.add(list(prompt), params)
        while engine.has_work:
            engine.step()
            step = engine.last_step
            if step.num_tokens == 0:
                continue
            rest[step.num_draft_tokens].append(step.time_total - step.time_draft - step.time_target)
            (draft[step.num_draft_tokens] if budget else idle).append(step.time_draft)
    return DrafterCosts(CostCurve.of_medians(draft), statistics.median(idle), CostCurve.of_medians(rest))
