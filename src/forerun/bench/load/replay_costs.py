"""Times of a step's parts by sequences and rows, measured once, by which a replay prices the steps of many requests."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from forerun.bench.load.asks import Ask
from forerun.bench.load.serving import Clients
from forerun.config import EngineConfig, SamplingParams
from forerun.drafters import Drafter
from forerun.engine import LLM
from forerun.engine.engine import Engine
from forerun.models import LanguageModel, Rows
from forerun.plan.step_times import CostCurve
from forerun.policy import FixedBudget

PER_SEQUENCE = (1, 2, 3, 5, 9, 17)
"""Rows of each sequence at which the target is timed."""
CHUNKS = (64, 256)
"""Rows of a prompt at which it is timed, for one sequence."""
MOST_ROWS = 320
"""No forward has more, but for CHUNKS."""
FARTHER = 3
"""Times the context at which the cost of a position is taken."""
DRAFT_COUNTS = (1, 4, 8)
"""K at which a drafter is timed, beside 0."""


@dataclass(frozen=True, slots=True)
class Surface:
    """Seconds by sequences and another count: a curve for each number of sequences, linear between, the last line
    continued beyond."""

    sequences: Sequence[int]
    curves: Sequence[CostCurve]

    def __call__(self, sequences: int, count: float) -> float:
        place = min(max(bisect_right(self.sequences, sequences), 1), len(self.sequences) - 1)
        if len(self.sequences) == 1:
            return _on_line(self.curves[0], count)
        low, high = self.sequences[place - 1], self.sequences[place]
        share = (sequences - low) / (high - low)
        below, above = (_on_line(self.curves[each], count) for each in (place - 1, place))
        return max(below + share * (above - below), 0.0)

    @classmethod
    def of_samples(cls, samples: Mapping[int, Mapping[float, Sequence[float]]]) -> Surface:
        """Through the medians. samples: by sequences, then by the other count."""
        batches = sorted(samples)
        curves = []
        for batch in batches:
            counts = sorted(samples[batch])
            curves.append(CostCurve(counts, [statistics.median(samples[batch][count]) for count in counts]))
        return cls(batches, curves)

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> Surface:
        """What a report in JSON holds of one."""
        return cls(state["sequences"], [CostCurve(each["counts"], each["seconds"]) for each in state["curves"]])


@dataclass(frozen=True, slots=True)
class TargetCosts:
    """Seconds of a forward.

    Attributes:
        rows: by sequences and rows, all of them together.
        context: positions of each sequence at which they were taken.
        position: seconds of each further one, or of each fewer.
    """

    rows: Surface
    context: int
    position: float

    def __call__(self, sequences: int, rows: int, context: int) -> float:
        """context: positions of all sequences together."""
        seconds = self.rows(sequences, rows)
        return max(seconds + self.position * (context - sequences * self.context), seconds / 4)

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> TargetCosts:
        """What a report in JSON holds of them."""
        return cls(Surface.read(state["rows"]), int(state["context"]), float(state["position"]))


@dataclass(frozen=True, slots=True)
class DrafterCosts:
    """Seconds of a step in a drafter and in the engine.

    Attributes:
        draft: by sequences that are asked and the longest draft: drafting, and learning what became of it.
        idle: by sequences, where none is asked (the other count is 0): learning alone.
        rest: by sequences and nodes for each: the engine's part.
    """

    draft: Surface
    idle: Surface
    rest: Surface

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> DrafterCosts:
        """What a report in JSON holds of them."""
        return cls(*(Surface.read(state[name]) for name in ("draft", "idle", "rest")))


def target_costs(model: LanguageModel, batches: Sequence[int], context: int, rounds: int) -> TargetCosts:
    """Measured: every number of sequences and rows in turn, medians of the rounds.

    context: positions of each sequence.
    """
    caches = [_filled(model, context) for _ in range(max(batches))]
    counts = [(batch, each) for batch in batches for each in PER_SEQUENCE if batch * each <= max(MOST_ROWS, batch)]
    counts += [(1, each) for each in CHUNKS]
    samples: dict[int, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(rounds + 1):
        for batch, each in counts:
            seconds = _forward_seconds(model, caches[:batch], each)
            if number:
                samples[batch][batch * each].append(seconds)
    far, near = ([_filled(model, FARTHER * context)], caches[:1])
    times = [[_forward_seconds(model, part, 1) for _ in range(2 * rounds + 1)] for part in (near, far)]
    position = (statistics.median(times[1]) - statistics.median(times[0])) / ((FARTHER - 1) * context)
    for cache in (*caches, *far):
        cache.free()
    return TargetCosts(Surface.of_samples(samples), context, max(position, 0.0))


def drafter_costs(
    plain: LLM,
    make: Callable[[], Drafter],
    batches: Sequence[int],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
) -> DrafterCosts:
    """Medians of real runs at each batch and some K.

    Args:
        make: a fresh drafter, bound to the target.
        prompts: as many as the largest batch.
        max_tokens: of each answer.
    """
    drafting: dict[int, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    idle: dict[int, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    rest: dict[int, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    params = SamplingParams(temperature=0, ignore_eos=True)
    for batch in batches:
        for k in (0, *DRAFT_COUNTS):
            config = EngineConfig(seed=0, max_batch=batch)
            engine = Engine(plain.target, make(), tokenizer=plain.tokenizer, config=config, budget=FixedBudget(k))
            clients = Clients(engine, params, f"costs {batch} {k}")
            for prompt in prompts[:batch]:
                clients.send(Ask(list(prompt), max_tokens))
            while len(clients.live) == batch:
                step = clients.step()
                if step.num_rows != batch + step.num_draft_tokens:
                    continue  # a prompt was computed
                others = step.time_total - step.time_draft - step.time_target
                rest[batch][round(step.num_draft_tokens / batch)].append(others)
                if k:
                    drafting[batch][min(k, -(-step.num_draft_tokens // batch))].append(step.time_draft)
                else:
                    idle[batch][0].append(step.time_draft)
            clients.leave()
    return DrafterCosts(Surface.of_samples(drafting), Surface.of_samples(idle), Surface.of_samples(rest))


def _filled(model: LanguageModel, context: int) -> Any:
    """A cache of so many positions."""
    cache = model.new_cache()
    with torch.inference_mode():
        model.forward([Rows(cache, [i % model.vocab_size for i in range(context)], num_logits=0)])
    cache.commit(range(context))
    return cache


def _forward_seconds(model: LanguageModel, caches: Sequence[Any], rows: int) -> float:
    token_ids = [i % model.vocab_size for i in range(rows)]
    batch = [Rows(cache, token_ids, num_logits=1 if rows in CHUNKS else None) for cache in caches]
    started = perf_counter()
    with torch.inference_mode():
        model.forward(batch)
    seconds = perf_counter() - started
    for cache in caches:
        cache.drop()
    return seconds


def _on_line(curve: CostCurve, count: float) -> float:
    """The curve, its last line continued."""
    if count <= curve.counts[-1] or len(curve.counts) < 2:
        return curve(count)
    (low, high), (before, last) = curve.counts[-2:], curve.seconds[-2:]
    return last + max(last - before, 0.0) / (high - low) * (count - high)
