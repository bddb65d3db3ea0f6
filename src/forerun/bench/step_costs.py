"""What a step's parts cost at batch 1, measured once, so that whole generations can be priced without a clock."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from forerun.config import EngineConfig, SamplingParams
from forerun.drafters import Drafter
from forerun.engine import LLM
from forerun.engine.budget import FixedBudget
from forerun.engine.engine import Engine
from forerun.models import LanguageModel, Rows

ROWS = (1, 2, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Rows of a forward at which the target is measured; costs between them are interpolated."""
FEWEST = 2
"""Steps that a number of nodes must have had for its median to count."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by a count, linear between the points and flat beyond them."""

    counts: Sequence[float]
    seconds: Sequence[float]

    def __call__(self, count: float) -> float:
        return float(np.interp(count, self.counts, self.seconds))

    @classmethod
    def of_medians(cls, samples: Mapping[int, Sequence[float]]) -> Curve:
        """Through the median of each count that was seen often enough (or of all, if none was)."""
        kept = {count: own for count, own in samples.items() if len(own) >= FEWEST} or samples
        if not kept:
            return cls([0], [0.0])
        counts = sorted(kept)
        return cls(counts, [statistics.median(kept[count]) for count in counts])


@dataclass(frozen=True, slots=True)
class DrafterCosts:
    """What a drafter costs a step, in seconds by the number of nodes it proposed.

    Attributes:
        draft: when it was asked: drafting, and learning what became of the draft.
        idle: learning alone, when it was not asked.
        rest: the engine's part of such a step: logits to verdicts, commits, text.
    """

    draft: Curve
    idle: float
    rest: Curve


@dataclass(slots=True)
class _Samples:
    draft: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    rest: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))


def target_costs(model: LanguageModel, context: int, rounds: int, rows: Sequence[int] = ROWS) -> Curve:
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
    return Curve.of_medians({count: own[1:] for count, own in samples.items()})


def drafter_costs(
    plain: LLM, make: Callable[[], Drafter], budgets: Sequence[int], prompt: Sequence[int], params: SamplingParams
) -> DrafterCosts:
    """Runs one generation at each fixed budget (0 is added) and takes medians by nodes proposed.

    Args:
        make: a fresh drafter, bound to the target.
    """
    samples, idle = _Samples(), []
    for budget in (0, *budgets):
        # the drafter is there at a budget of 0 as well: what it costs to keep it warm is to be measured
        config = EngineConfig(num_draft_tokens=max(1, budget), seed=0)
        engine = Engine(plain.target, make(), tokenizer=plain.tokenizer, config=config, budget=FixedBudget(budget))
        engine.add(list(prompt), params)
        while engine.has_work:
            engine.step()
            step = engine.last_step
            if step.num_tokens == 0:
                continue
            rest = step.time_total - step.time_draft - step.time_target
            samples.rest[step.num_draft_tokens].append(rest)
            if budget:
                samples.draft[step.num_draft_tokens].append(step.time_draft)
            else:
                idle.append(step.time_draft)
    return DrafterCosts(Curve.of_medians(samples.draft), statistics.median(idle), Curve.of_medians(samples.rest))
