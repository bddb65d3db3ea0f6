"""Times of steps: those that are measured before the first request, from which K is chosen, and those at a fixed K."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from forerun.config import OFF, EngineConfig, SamplingParams
from forerun.drafters import Drafter
from forerun.engine.engine import Engine
from forerun.engine.results import StepStats
from forerun.kernels.cpu.page_layout import PAGE
from forerun.kv_cache import SequenceCache
from forerun.models import LanguageModel, Rows, identity
from forerun.speculation import (
    AutomaticPolicy,
    CostModel,
    DraftChooser,
    DraftOutcome,
    DraftPlan,
    FixedPolicy,
    SpeculationPolicy,
    StepCost,
    drafter_costs,
)
from forerun.speculation.cost_model import KINDS, Table, forward_costs
from forerun.types import Draft, Sequence as Tokens, Step
from forerun.utils.deferred import DeferredModule

if TYPE_CHECKING:
    from forerun.speculation import predictor
else:
    predictor = DeferredModule("forerun.speculation.predictor")

STEP_ROUNDS = 6

CALIBRATION_ROWS = (1, 5, 2, 3, 8, 4, 6, 12, 16, 32)
"""Rows of the steps that are timed before the first request, the most telling first."""
CALIBRATION_CONTEXT = 16
"""Positions before them."""
CALIBRATION_SECONDS = {1: 1.0, 4: 0.5}
"""Time for this by sequences, once for a model, its number format, the number of threads and the machine."""
CALIBRATION_ROUNDS = 5
POSITION_ROWS = (1, 5, 2, 8)
"""Rows of forwards that are timed before few and after many positions, the most telling first."""
POSITION_LEAST = 128
"""The least of these many positions: what fewer cost is not told."""
POSITION_COUNT = 4096
"""The most of them."""
POSITION_MEMORY = 2**27
"""The most bytes that they may take."""
POSITION_ORDER = (*POSITION_ROWS[:2] * 2, *POSITION_ROWS[2:] * 2, *POSITION_ROWS, *POSITION_ROWS[:1])
"""Of these forwards: each row count twice at least, as the two fastest have to agree, and often that to which positions
add least."""
POSITION_SECONDS = 0.8
"""Time for this."""
POSITION_FORWARD = 0.1
"""The most seconds that a step of one row may take: larger models learn in use what positions cost."""
POSITION_SHARE = 0.02
"""Of a forward without positions, the least that they must add to count, beside what the two fastest forwards differ
by."""
POSITION_RISE = 0.9
"""The same, of what they add to fewer rows."""
CHECK_POSITIONS = 2.0
"""Factor between what a position costs now and what another process has measured, from which all is measured anew."""
CHECK_ROWS, CHECK_SECONDS, CHECK_TOLERANCE = (1, 5), 0.1, 0.2
"""Rows of the steps that are timed where another process has measured, the time for them, each at least once, and the
relative difference in what further rows cost from which all is measured anew: the machine may have been busy."""
DRAFT_SECONDS = 1.5
"""Time for a drafter's calibration."""
CALIBRATION_PROMPT = 64
"""Positions that a drafter follows before it is timed."""
_STRIDE = 997
"""Between the tokens of rows that are timed."""
CALIBRATION_DRAFTS = (0, 1, 1, 4, 1, 4, 0, 4, 1, 4)
"""K of the steps in which it is timed."""


def calibrate(target: LanguageModel, drafter: Drafter | None = None) -> Table:
    """Time steps of a few row counts, and drafts, unless that was done before and a short check agrees, so that
    automatic policies which are made from now on know what a step costs. Large models have time for fewer counts; the
    others are interpolated.

    Args:
        drafter: bound to the target; of one that calls others, these are timed.

    Returns:
        Seconds of a step of one sequence by its rows, drafting apart.
    """
    check_costs(target)
    stored = forward_costs(identity(target))
    known = stored.costs.target(KINDS[0], 1, CALIBRATION_CONTEXT)
    if known is None:
        _calibrate_steps(target, stored.costs)
        stored.save()
        known = stored.costs.target(KINDS[0], 1, CALIBRATION_CONTEXT)
        assert known is not None
    for member in () if drafter is None else drafter.members:
        if not member.traits.estimates:
            _calibrate_drafter(target, member, float(known[1]))
    return known


def _calibrate_steps(target: LanguageModel, costs: CostModel) -> None:
    """Learn what steps of a few row counts cost, and what a position of the context adds to them."""
    for batch, most_seconds in CALIBRATION_SECONDS.items():
        for count, samples in sorted(_time_rows(target, batch, most_seconds).items()):
            seconds, experts = zip(*samples, strict=True)
            median = statistics.median(seconds)
            costs.add_target(KINDS[0], batch, batch * CALIBRATION_CONTEXT, count, median, len(seconds))
            if batch == 1 and any(experts):
                costs.add_experts(count, statistics.fmean(experts))
    alone = costs.target(KINDS[0], 1, CALIBRATION_CONTEXT)
    assert alone is not None
    if alone[1] <= POSITION_FORWARD:
        length, found = _positions(target, POSITION_ORDER)
        if len(found) > 1:
            costs.add_positions(length, found)


def _positions(target: LanguageModel, order: Sequence[int]) -> tuple[int, dict[int, float]]:
    """Time positions. Returns how many there were, and the seconds of one by rows; none if they cannot be told."""
    cache = target.new_cache()
    length = _positions_held(target, cache) if isinstance(cache, SequenceCache) else 0
    if not isinstance(cache, SequenceCache) or length < POSITION_LEAST:
        return length, {}
    found = _position_costs(_time_positions(target, cache, length, order))
    return length, {rows: each / (length - CALIBRATION_CONTEXT) for rows, each in found.items()}


def _position_costs(samples: Mapping[int, Sequence[tuple[float, float]]]) -> dict[int, float]:
    """Return by rows what positions add to a forward; nothing if that of any cannot be told: on a busy machine forwards
    differ by more.

    samples: by rows, the seconds of forwards without positions and with them.
    """
    found: dict[int, float] = {}
    least = 0.0
    for rows, pairs in sorted(samples.items()):
        if len(pairs) < 2:
            continue
        (short, next_short, *_), (long, next_long, *_) = map(sorted, zip(*pairs, strict=True))
        spread = next_short - short + next_long - long
        found[rows] = long - short
        if found[rows] <= max(POSITION_SHARE * short, spread, POSITION_RISE * least):
            return {}
        least = found[rows]
    return found


def _positions_held(target: LanguageModel, cache: SequenceCache) -> int:
    """Return how many positions a cache can have while they are timed, with half of what the pool has left."""
    room = max(POSITION_ROWS)
    length = min(POSITION_COUNT, POSITION_MEMORY // cache.pool.page_nbytes * PAGE, target.context_length - room)
    while length > 0 and 2 * cache.pages_wanted(length + room) > cache.pool.num_available:
        length //= 2
    return length


@torch.inference_mode()
def _time_positions(
    target: LanguageModel, cache: SequenceCache, length: int, order: Sequence[int]
) -> dict[int, list[tuple[float, float]]]:
    """Return the seconds of forwards after few and after `length` positions by rows, in this order, until the time is
    over. The positions have keys and values that nobody computed: forwards after them take the same time."""
    begin = perf_counter()
    ones = torch.ones((), dtype=cache.dtype, device=target.device)
    cache.feed([-1] * length)
    for layer, (heads, *widths) in enumerate(cache.shapes):  # memory that nobody wrote to is read too quickly
        cache.write(layer, 0, *(ones.expand(heads, length, width) for width in widths))
    cache.drop()
    samples: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for rows in order:
        if perf_counter() - begin > POSITION_SECONDS:
            break
        filler = [_STRIDE * i % target.vocab_size for i in range(rows)]
        seconds = []
        for cache.length in (CALIBRATION_CONTEXT, length):
            started = perf_counter()
            target.forward([Rows(cache, filler)]).logits[-1, 0].item()
            seconds.append(perf_counter() - started)
            cache.drop()
        samples[rows].append((seconds[0], seconds[1]))
    cache.free()
    return samples


def _answering(
    target: LanguageModel, drafter: Drafter, policy: SpeculationPolicy, batch: int, length: int, params: SamplingParams
) -> Engine:
    """Return an engine with so many requests, whose prompts are different and of this length, or of half the context.
    Pools keep their bounds: those of the target's user, or none yet."""
    config = EngineConfig(seed=0, prefix_reuse=OFF)
    engine = Engine(target, drafter, config=config, policy=policy, bounds_memory=False)
    length = min(length, target.context_length // 2)
    for number in range(batch):
        engine.add([(number + i) % target.vocab_size for i in range(length)], params)
    return engine


class _Filler(Drafter):
    """Drafts different tokens at no cost: rows of one token would be given to the same experts of a mixture."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def start(self, sequence: Tokens) -> None: ...

    def draft(
        self, sequences: Sequence[Tokens], num_draft_tokens: Sequence[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        return [Draft.chain([_STRIDE * i % self._vocab_size for i in range(k)]) for k in num_draft_tokens]

    def commit(self, steps: Sequence[Step]) -> None: ...

    def stop(self, sequence: Tokens) -> None: ...


class _RowTimer(SpeculationPolicy):
    """Gives the steps so many rows, all drafts to the first sequence, and keeps the seconds of those with `batch`
    sequences and the experts that they read, by rows."""

    def __init__(self, rows: Sequence[int], batch: int) -> None:
        self.rows = list(rows)
        self._batch = batch
        self.samples: dict[int, list[tuple[float, int]]] = defaultdict(list)

    def plan(self, sequences: Sequence[Tokens]) -> DraftPlan:
        drafted = self.rows.pop(0) - len(sequences) if self.rows else 0
        return DraftPlan([max(min(drafted, sequences[0].room), 0), *[0] * (len(sequences) - 1)])

    def observe(self, cost: StepCost, outcomes: Sequence[DraftOutcome]) -> None:
        if len(outcomes) == self._batch and not cost.num_prompt_rows:  # a small pool may not hold all of them
            self.samples[cost.num_rows].append((cost.seconds - cost.time_draft, cost.num_experts))


def check_costs(target: LanguageModel) -> None:
    """Forget what another process has measured if further rows, or positions, cost something else now. The pace of all
    steps is followed in use, and does not count. Called before drafters that choose by costs are made."""
    stored = forward_costs(identity(target))
    known = stored.costs.target(KINDS[0], 1, CALIBRATION_CONTEXT) if stored.is_from_file else None
    if known is None:
        return
    few, many = CHECK_ROWS
    found = _time_rows(target, few, CHECK_SECONDS, CHECK_ROWS, least=len(CHECK_ROWS))
    if few in found and many in found:  # else the context is too short
        pace = min(found[few])[0] / float(known[few])
        ratio = min(found[many])[0] / float(known[many]) / pace
        if not 1 - CHECK_TOLERANCE < ratio < 1 + CHECK_TOLERANCE or _has_other_positions(target, stored.costs, pace):
            stored.forget()


def _has_other_positions(target: LanguageModel, costs: CostModel, pace: float) -> bool:
    """Return whether positions were timed and cost something else now. pace: of steps, in which they have a share."""
    near, far = (costs.target(KINDS[0], 1, CALIBRATION_CONTEXT + more) for more in (0, 1))
    then = 0.0 if near is None or far is None else float(far[1] - near[1]) * pace
    now = _positions(target, POSITION_ROWS[:1] * 2)[1].get(1) if then else None
    return now is not None and not 1 / CHECK_POSITIONS < now / then < CHECK_POSITIONS


def _time_rows(
    target: LanguageModel, batch: int, most_seconds: float, rows: Sequence[int] = CALIBRATION_ROWS, least: int = 1
) -> dict[int, list[tuple[float, int]]]:
    """Time the engine's steps of so many sequences, drafting apart, until so many seconds are over: a forward that is
    only repeated may be a quarter cheaper than one of a step. Returns seconds and experts by rows.

    least: row counts that are timed whatever the time.
    """
    once = [count for count in rows if count >= batch]
    timer = _RowTimer([batch, *once * CALIBRATION_ROUNDS], batch)
    begin = perf_counter()
    # hardly more than a token a step, as the drafts are wrong, and room for the longest draft
    params = SamplingParams(temperature=0, max_tokens=len(timer.rows) + max(rows), ignore_eos=True)
    engine = _answering(target, _Filler(target.vocab_size), timer, batch, CALIBRATION_CONTEXT, params)
    while timer.rows and engine.has_work and (perf_counter() - begin < most_seconds or len(timer.samples) < least):
        engine.step()
    engine.close()
    return timer.samples


class _Calibration(AutomaticPolicy):
    """Gives every sequence the next K of a list, and learns what steps cost.

    Attributes:
        engine_seconds: seconds of the engine's part of each step.
    """

    def __init__(self, costs: CostModel, counts: Sequence[int], num_unseen: int) -> None:
        super().__init__(DraftChooser(costs))
        self.counts = list(counts)
        self._num_unseen = num_unseen
        self.engine_seconds: list[float] = []

    def plan(self, sequences: Sequence[Tokens]) -> DraftPlan:
        return DraftPlan([self.counts.pop(0) if self.counts else 0] * len(sequences))

    def observe(self, cost: StepCost, outcomes: Sequence[DraftOutcome]) -> None:
        self.engine_seconds.append(cost.time_verify + cost.time_rest)
        if outcomes and self._num_unseen:  # the first drafts include allocations
            self._num_unseen -= 1
            self.chooser.observe(outcomes, 0.0, None)
        else:
            super().observe(cost, outcomes)


def _calibrate_drafter(target: LanguageModel, drafter: Drafter, step_seconds: float) -> None:
    """Time a drafter in short answers, unless its costs are known."""
    stored = drafter_costs((identity(target), *drafter.traits.cost_key))
    if not stored.costs.largest_draft:
        length = CALIBRATION_PROMPT if step_seconds < DRAFT_SECONDS / 32 else CALIBRATION_PROMPT // 4
        time_drafts(target, drafter, stored.costs, length, DRAFT_SECONDS)
        stored.save()


def time_drafts(
    target: LanguageModel, drafter: Drafter, costs: CostModel, length: int, most_seconds: float = math.inf
) -> list[float]:
    """Learn what drafts cost from answers to prompts of this length, until so many seconds are over. Returns the
    seconds of the engine's part of each step."""
    begin = perf_counter()
    whole = drafter.traits.fixed_length_draft
    counts = [k and (whole or k) for k in CALIBRATION_DRAFTS]
    params = SamplingParams(temperature=0, max_tokens=5 * len(counts), ignore_eos=True)
    rest: list[float] = []
    # first unseen drafts, then timed ones, one of a sequence that has not drafted yet, and those of four sequences
    for batch, schedule, num_unseen in ((1, [counts[1], *counts], 1), (1, counts[1:3], 0), (4, counts[1:], 1)):
        policy = _Calibration(costs, schedule, num_unseen)
        engine = _answering(target, drafter, policy, batch, length, params)
        while engine.has_work and policy.counts and perf_counter() - begin < most_seconds:
            engine.step()
        engine.close()
        rest += policy.engine_seconds
    return rest


def step_costs(
    target: LanguageModel,
    tokenizer: Any,
    make: Callable[[], Drafter],
    most: int,
    prompt: Sequence[int],
    params: SamplingParams,
    rounds: int = STEP_ROUNDS,
) -> predictor.CostsByK:
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
    return predictor.CostsByK(min(plain), *(_of_fastest(parts, name, counts) for name in parts))


def _of_fastest(parts: Mapping[str, Mapping[int, Sequence[float]]], name: str, counts: Sequence[int]) -> list[float]:
    """Return one part of the step of each count, in the round in which the whole step was the fastest. Other rounds
    hold time that other programs took. Counts without a step get what lies between their neighbours."""
    seen = sorted(parts[name])
    chosen = []
    for count in seen:
        whole = [sum(each) for each in zip(*(part[count] for part in parts.values()), strict=True)]
        chosen.append(parts[name][count][whole.index(min(whole))])
    return [float(np.interp(count, seen, chosen)) for count in counts]


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
    fixed = FixedPolicy(num_draft_tokens)
    config = EngineConfig(seed=0, prefix_reuse=OFF)
    engine = Engine(target, drafter, tokenizer=tokenizer, config=config, policy=None if drafter is None else fixed)
    engine.add(list(prompt), params)
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise output.error
        if engine.last_step.num_tokens:
            yield engine.last_step
