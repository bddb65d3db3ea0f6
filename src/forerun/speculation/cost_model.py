"""The measured costs of a step, learned while it runs, and kept for the next engine of the same models on the same
machine."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from forerun.config import MAX_NUM_DRAFT_TOKENS
from forerun.types import Sequence as Request
from forerun.utils.files import EntryFile, key_here
from forerun.utils.home import COSTS_STEM

Table = NDArray[np.float64]

COST_MEMORY = 32.0
"""Largest weight of a mean, in observations: each new one moves it by at least one part in so many."""
COST_CLIP = 3.0
"""An observation further from its mean than this factor counts as this far, so that single slow steps do not last."""
COST_SLOPE = 0.02
"""Prior cost of each further row, as a share of the forward's cost, while only one row count was seen."""
COST_TOLERANCE = 0.01
"""Relative change of a mean from which the table is computed again."""


class LearnedCurve:
    """The cost as a function of a whole number: rows of a forward, or nodes requested of a drafter.

    Each count seen has a mean of its own, so that steps (kernels that pad) show; between them the shape is
    interpolated, and beyond them it continues the weighted regression line through all of them. The estimate never
    falls as the count rises. Observations are clipped, and earlier ones lose weight.

    Args:
        size: counts 0..size - 1; larger ones count as the last.
        flat: the prior for other counts while only one was seen: the same cost and a small slope; False: a cost in
            proportion to the count.
        shape: a curve of the same counts in other circumstances, which has seen two or more: between and beyond the
            counts seen here, this curve has its shape in place of a line's.
    """

    __slots__ = ("_flat", "_form", "_means", "_shape", "_size", "_stale", "_table", "_tabled", "_weights")

    def __init__(self, size: int, flat: bool = True, shape: LearnedCurve | None = None) -> None:
        self._size = size
        self._flat = flat
        self._shape = shape
        self._form: Table | None = None  # of the shape, from which the table was computed
        self._means: dict[int, float] = {}
        self._weights: dict[int, float] = {}
        self._tabled: dict[int, float] = {}  # the means of which the table was computed
        self._table: Table = np.zeros(0)
        self._stale = False

    def __bool__(self) -> bool:
        """Return whether any observation was made."""
        return bool(self._means)

    @property
    def largest(self) -> int:
        """Return the largest count seen; 0 if none."""
        return max(self._means, default=0)

    def weight(self, count: int) -> float:
        """Return the weight of the observations of this count."""
        return self._weights.get(min(count, self._size - 1), 0.0)

    def add(self, count: int, seconds: float, share: float = 1.0) -> None:
        """Add one observation. share: its weight; n for the mean of n."""
        count = min(count, self._size - 1)
        mean = self._means.get(count)
        weight = self._weights.get(count, 0.0)
        if mean is None:
            if self._means:  # the first of a count often includes allocations and the choice of kernels
                seconds = min(seconds, COST_CLIP * float(self.table(count + 1)[count]))
            mean = seconds
        elif weight < COST_CLIP and seconds < mean / COST_CLIP:
            # the few before were the exception
            mean = seconds
            weight = 0.0
        else:
            seconds = min(max(seconds, mean / COST_CLIP), mean * COST_CLIP)
            mean += share * (seconds - mean) / (weight + share)
        self._means[count] = mean
        self._weights[count] = min(weight + share, COST_MEMORY)
        tabled = self._tabled.get(count)
        if tabled is None or abs(mean - tabled) > COST_TOLERANCE * mean:
            self._stale = True

    def table(self, most: int | None = None) -> Table:
        """Return [most or more] seconds by count, up to `size`; all if None. Read only."""
        most = self._size if most is None else min(most, self._size)
        form = None
        if self._shape is not None and len(self._shape._means) > 1:
            form = self._shape.table(max(most, min(self._size, self.largest + 2)))
        if self._stale or len(self._table) < most or form is not self._form:
            base = self._line(min(self._size, max(most, self.largest + 2))) if form is None else form
            self._table = self._compute(base, is_shape=form is not None)
            self._tabled = dict(self._means)
            self._form = form
            self._stale = False
        return self._table

    def state(self) -> dict[str, list[float]]:
        """Return means and weights by count, as JSON holds them."""
        return {str(x): [mean, self._weights[x]] for x, mean in self._means.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Begin with what `state` once gave, with the weight of a few observations.

        Raises:
            ValueError, TypeError, KeyError, AttributeError, OverflowError: it is something else.
        """
        points = {int(x): (float(mean), float(weight)) for x, (mean, weight) in state.items()}
        if not points:
            raise ValueError("no points")
        for x, (mean, weight) in points.items():
            if not (0 <= x < self._size and 0 < mean < 1e6 and 0 < weight < 1e6):
                raise ValueError(f"{x}: {mean}, {weight}")
        self._means = {x: mean for x, (mean, _) in points.items()}
        self._weights = {x: min(weight, COST_MEMORY / 4) for x, (_, weight) in points.items()}
        self._stale = True

    def take(self, other: LearnedCurve) -> None:
        """Add what another curve has observed."""
        for count, mean in other._means.items():
            self.add(count, mean, other._weights[count])

    def _compute(self, base: Table, is_shape: bool) -> Table:
        """Return [most] seconds, where `most` is beyond the largest count seen: the table rises from there on by
        itself.

        Args:
            base: [most], to be bent.
            is_shape: it is another curve's.
        """
        most = len(base)
        if not self._means:
            return np.zeros(most)
        points = sorted(self._means)
        base = np.maximum(base, 1e-12)
        # between the points the line is bent to go through them; outside it keeps the ratio of the outermost one
        ratios = np.array([self._means[x] for x in points]) / base[points]
        if is_shape:  # counts that are seldom seen stay near the calibrated shape
            middle = ratios[int(np.argmax([self._weights[x] for x in points]))]
            ratios = np.clip(ratios, (1 - COST_SURPRISE) * middle, (1 + COST_SURPRISE) * middle)
        table = base * np.interp(np.arange(most), points, ratios)
        # halfway between the smallest rising table above it and the largest below it
        rising = np.maximum.accumulate(table)
        return (rising + np.minimum.accumulate(table[::-1])[::-1]) / 2

    def _line(self, most: int) -> Table:
        """Return [most] the regression line through the means, rising and positive; zeros without any."""
        if not self._means:
            return np.zeros(most)
        counts = np.arange(most, dtype=np.float64)
        points = [(x, mean, self._weights[x]) for x, mean in self._means.items()]
        if len(points) == 1:
            ((x, mean, _),) = points
            shape: Table = 1 + COST_SLOPE * counts if self._flat else np.maximum(counts, 0.5) / max(x, 0.5)
            return shape * mean
        total = sum(weight for _, _, weight in points)
        centre = sum(weight * x for x, _, weight in points) / total
        middle = sum(weight * mean for _, mean, weight in points) / total
        slope = sum(weight * (x - centre) * (mean - middle) for x, mean, weight in points)
        slope = max(slope / sum(weight * (x - centre) ** 2 for x, _, weight in points), 0.0)
        return np.maximum(middle + slope * (counts - centre), min(self._means.values()) / 2)


KINDS = ("greedy", "drawn")
"""Of requests: what logits cost after the forward depends on it."""
COST_SIZE = 1025
"""Rows of a forward, up to which their number changes its estimated cost."""
COST_PACE = 0.1
"""Power of the ratio of measured over expected seconds by which the machine's pace moves at each step."""
COST_SURPRISE = 0.25
"""Relative difference from what was expected up to which a step moves pace and slopes."""
COST_FAR = 2.0
"""Factor on the longest context seen beyond which the first steps tell what positions cost, however they surprise.
Others do not."""
COST_REACH = 256.0
"""Context that counts as seen where none was timed: in a shorter one, noise outweighs what positions cost."""
EXPERTS_AGAIN = 1.25
"""Choices of the router over those from which experts were expected last, from which they are expected anew."""
COST_TRUSTED = 4.0
"""Observations of a row count before its steps move the pace."""
FIRST_SHARE = 0.25
"""Weight of a draft before which the drafter computed with earlier tokens."""
SHAPE_BATCH = 4
"""Most sequences whose steps tell what further rows cost any number: each sequence has a cost beside its rows."""
COST_GROWTH = 0.5
"""Power of the number of sequences with which drafting is taken to grow while only one number was seen."""


class CostModel:
    """Seconds of a step's parts: the target by rows, batch and context, the drafter by nodes asked of it.

    Two things must not be mistaken for a difference between values of K: the context grows, and the machine's speed
    changes. A position costs the more, the more rows its sequence has (`add_positions`), and the machine has a pace:
    curves over rows are of no positions at pace 1.

    A batch has a curve over rows of its own, in the shape of few sequences' wherever it was not measured: what further
    rows cost at one batch size is known at every other. Drafting grows with a power of the number of
    sequences, taken from two numbers that were seen.

    In a mixture of experts, rows cost by the experts that they are given to. Rows of any tokens are timed, and the
    experts that they read counted; rows of a text read others, as many as the router's choices so far let expect
    (`expect_experts`).
    """

    def __init__(self) -> None:
        self._target: dict[tuple[str, int], LearnedCurve] = {}
        self._shapes: dict[str, LearnedCurve] = {}  # by kind, of few sequences
        self._draft: defaultdict[int, LearnedCurve] = defaultdict(
            partial(LearnedCurve, MAX_NUM_DRAFT_TOKENS + 1, flat=False)
        )
        self._idle = LearnedCurve(1)
        self._follow = (0.0, 0.0)  # seconds and tokens, of which earlier ones have lost weight
        self._positions = LearnedCurve(COST_SIZE)  # by rows of a sequence, seconds of a position when it was timed
        self._position = _Slope(reach=COST_REACH)  # seconds of one before a single row
        self._pace = 1.0
        self._experts: dict[int, float] = {}  # by rows, those that were read while costs were timed
        self._timed: Table = np.zeros(0)  # the same by all numbers of rows
        self._expert = _Slope()  # seconds of a further one
        self._more: Table = np.zeros(1)  # by rows, those that are expected beyond these
        self._given = np.zeros(0, np.int64)  # rows of each when it began to be used
        self._num_choices = 0.0  # of the router since, from which `_more` follows

    def target(self, kind: str, batch: int, context: float, most: int = COST_SIZE) -> Table | None:
        """Return [most at most] seconds by rows of a step without prompt chunks; None if no such step was seen.

        Args:
            kind: of requests, "greedy" or "drawn": what logits cost after the forward depends on it.
            batch: sequences.
            context: positions in their caches, summed.
            most: row counts that are of interest.
        """
        key = _nearest(self._target, (kind, bucket(batch)))
        if key is None:
            return None
        table = self._target[key].table(most)[:most]
        if self._num_choices and len(table):
            more = self._more[np.minimum(np.arange(len(table)), len(self._more) - 1)]
            table = np.maximum(table + self._expert.value * more, table[0])
        return (table + self._position.value * context * self._by_rows(batch, len(table))) * self._pace

    def knows(self, kind: str, batch: int, context: float, rows: int) -> bool:
        """Return whether enough steps with this number of rows were seen, and contexts that are not far shorter."""
        curve = self._target.get((kind, bucket(batch)))
        enough = curve is not None and curve.weight(rounded_rows(rows)) >= COST_TRUSTED
        return enough and not self._position.is_far(context / batch)

    def draft(self, batch: int, places: int) -> Table:
        """Return [places + 1] seconds in the drafter by the largest K of `batch` sequences; zeros if none was measured.

        At 0 it does not draft, and the cost is that of its update with the verdicts.
        """
        wanted = bucket(batch)
        key = min((key for key, curve in self._draft.items() if curve), key=lambda key: abs(key - wanted), default=None)
        idle = float(self._idle.table()[0])
        if key is None:
            table = np.zeros(places + 1)
        else:
            own = self._draft[key].table(places + 1)[: places + 1]
            table = own if key == wanted else idle + (own - idle) * (wanted / key) ** self.growth
            table = table * self._pace
        table[0] = idle * self._pace
        return table

    @property
    def growth(self) -> float:
        """Return the power of the number of sequences with which drafting grows, from 0 to 1."""
        seen = sorted(key for key, curve in self._draft.items() if curve)
        if len(seen) < 2:
            return COST_GROWTH
        few = seen[0]
        many = seen[-1]
        most = min(self._draft[few].largest, self._draft[many].largest) + 1
        low, high = (float(self._draft[key].table(most)[1:most].sum()) for key in (few, many))
        return min(max(math.log(max(high, 1e-12) / max(low, 1e-12)) / math.log(many / few), 0.0), 1.0)

    @property
    def largest_draft(self) -> int:
        """Return the largest K that was tried."""
        return max((curve.largest for curve in self._draft.values()), default=0)

    def add_target(
        self,
        kind: str,
        batch: int,
        context: float,
        rows: int,
        seconds: float,
        share: float = 1.0,
        num_experts: float = 0.0,
    ) -> None:
        """Add a step without prompt chunks: forward, verification and the engine's other work.

        Args:
            share: its weight; n where context and seconds are the means of n such steps.
            num_experts: that it read, in all layers.
        """
        more = num_experts - float(self._timed[rows]) if num_experts and rows < len(self._timed) else 0.0
        key = (kind, bucket(batch))
        positions = context * float(self._by_rows(batch, rows + 1)[rows])
        rows = rounded_rows(rows)
        curve = self._target.get(key)
        if curve is None:
            curve = self._new_curve(key)
        base = float(curve.table(rows + 1)[rows])
        beside = self._position.value * positions + self._expert.value * more
        expected = max(base + beside, base / 4, 1e-9)
        surprise = seconds / (expected * self._pace)
        # what more rows than were seen cost is a guess: their surprise may be the rows'
        is_new = rows <= curve.largest and self._position.believes(context / batch, surprise)
        if is_new or curve.weight(rows) >= COST_TRUSTED:
            if not is_new:  # one hiccup moves little
                surprise = min(max(surprise, 1 - COST_SURPRISE), 1 + COST_SURPRISE)
                self._pace *= surprise ** (1 - (1 - COST_PACE) ** share)
                self._expert.add(more, (surprise - 1) * expected / (more or 1), share)
            # within reach the curves and the pace follow; a slope that moved with them would drift away without end
            # where what positions cost by rows is wrong
            error = (surprise - 1) * expected / (positions or 1) if is_new else 0.0
            self._position.add(context / batch, error, share, is_new)
            beside = self._position.value * positions + self._expert.value * more
        paced = seconds / self._pace
        base = base if curve else max(paced - beside, paced / 4)
        # of what is still unexpected, rows and what is beside them have their shares
        seconds = paced * base / max(base + beside, base / 4, 1e-9)
        curve.add(rows, seconds, share)
        shape = self._shapes[kind]
        if batch <= SHAPE_BATCH or len(shape._means) < 2:
            shape.add(rows, seconds, share)

    def add_positions(self, context: float, seconds: Mapping[int, float]) -> None:
        """Add the seconds of each of so many positions of one sequence, by its rows, as they were timed."""
        for rows, each in sorted(seconds.items()):
            self._positions.add(rows, each)
        self._position = _Slope(float(self._positions.table(2)[1]), context)

    def _by_rows(self, batch: int, most: int) -> Table:
        """Return [most] what a position costs by the rows of a step, as many of each sequence, over the cost before a
        single row of a sequence: never less, nor more than that of so many sequences. Where nothing was timed, it is
        the square root of the rows."""
        counts = np.arange(min(max(most // batch + 2, 2), COST_SIZE), dtype=np.float64)
        if self._positions:
            table = self._positions.table(len(counts))[: len(counts)]
            ratios = table / table[1]
        else:
            ratios = np.sqrt(counts)
        by_rows: Table = np.interp(np.arange(most) / batch, counts, np.clip(ratios, 1, np.maximum(counts, 1)))
        return by_rows

    def add_experts(self, rows: int, count: float) -> None:
        """Add the experts that so many rows read while they were timed."""
        self._experts[rows] = count

    def expect_experts(self, given: NDArray[np.int64]) -> None:
        """Expect of the rows of a text what the router chose so far: each expert with the chance that it had.

        given: [experts of all layers] rows that each was given.
        """
        if not len(self._timed):
            return
        before = self._given.sum() + self._num_choices
        if len(given) != len(self._given) or given.sum() < before:  # rows that were timed are no text's
            self._given = given
            self._num_choices = 0.0
        choices = given - self._given
        if choices.sum() <= EXPERTS_AGAIN * self._num_choices:
            return
        self._num_choices = float(choices.sum())
        missed = 1 - np.minimum(choices * (self._timed[1] / self._num_choices), 1.0)
        woken = len(missed) - np.cumprod(np.broadcast_to(missed, (len(self._timed) - 1, len(missed))), 0).sum(1)
        self._more = np.array([0.0, *(woken - self._timed[1:])])

    def add_draft(self, batch: int, num_draft_tokens: int, seconds: float, share: float = 1.0) -> None:
        """Add a drafter's time for at most `num_draft_tokens` nodes of each of `batch` sequences."""
        self._draft[bucket(batch)].add(num_draft_tokens, seconds / self._pace, share)

    def add_first_draft(self, batch: int, num_draft_tokens: int, lag: int, seconds: float) -> None:
        """Add a drafter's time where it computed with `lag` tokens before: what exceeds the usual cost was theirs."""
        usual = float(self.draft(batch, num_draft_tokens)[num_draft_tokens])
        if usual:
            kept = 1 - 1 / COST_MEMORY
            self._follow = self._follow[0] * kept + max(seconds - usual, 0.0) / self._pace, self._follow[1] * kept + lag
        if not usual or seconds < usual:
            self._draft[bucket(batch)].add(num_draft_tokens, seconds / self._pace, FIRST_SHARE)

    def follow(self, lag: int) -> float:
        """Return the seconds of the drafter's computation with `lag` tokens before it drafts."""
        seconds, tokens = self._follow
        return self._pace * seconds / tokens * lag if tokens else 0.0

    def add_idle(self, seconds: float, share: float = 1.0) -> None:
        """Add the drafter's time in a step that drafted nothing."""
        self._idle.add(0, seconds / self._pace, share)

    def _new_curve(self, key: tuple[str, int]) -> LearnedCurve:
        shape = self._shapes.setdefault(key[0], LearnedCurve(COST_SIZE))
        curve = self._target[key] = LearnedCurve(COST_SIZE, shape=shape)
        return curve

    def begin_with(self, steps: CostModel) -> None:
        """Take what steps cost that were timed before (`engine/step_times.py`), where nothing was observed."""
        timed = {key: curve for key, curve in steps._target.items() if not self._target.get(key)}
        for kind in KINDS:
            if not self._shapes.get(kind):
                self._shapes[kind] = LearnedCurve(COST_SIZE)
                for curve in timed.values():
                    self._shapes[kind].take(curve)
        for key, curve in timed.items():
            self._new_curve(key).take(curve)
        if steps._positions and not self._positions:
            self._positions = steps._positions
            self._position = _Slope(steps._position.value, steps._position.reach)
        alone = timed.get((KINDS[0], 1))
        many = max(steps._experts, default=1)
        if alone is not None and many > 1 and not self._experts:
            self._experts = dict(steps._experts)
            seconds = alone.table(many + 1)
            counts = sorted(self._experts)
            self._timed = np.interp(np.arange(many + 1), counts, [self._experts[count] for count in counts])
            further = max(self._experts[many] - self._experts[1], 1.0)
            self._expert = _Slope(max(float(seconds[many] - seconds[1]), 0.0) / further, further)

    def take_drafts(self, other: CostModel) -> None:
        """Take what another model knows of a drafter."""
        self._draft = other._draft
        self._idle = other._idle
        self._follow = other._follow

    def state(self) -> dict[str, Any]:
        """Return the model as plain numbers, for the next process; with costs of drafts, without those of steps, which
        the target's own entry has, so that they are measured anew in one place."""
        steps = {} if self.largest_draft else self._target
        timed = self._positions and not self.largest_draft
        return {
            "target": [[*key, curve.state()] for key, curve in steps.items() if curve],
            "draft": [[key, curve.state()] for key, curve in self._draft.items() if curve],
            "positions": [self._position.reach, self._positions.state()] if timed else None,
            "follow": list(self._follow),
            "experts": {} if self.largest_draft else {str(rows): count for rows, count in self._experts.items()},
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> CostModel:
        """Make a model that begins with what `state` once gave.

        Raises:
            ValueError, TypeError, KeyError, AttributeError, OverflowError: it is something else.
        """
        costs = cls()
        for kind, batch, points in state["target"]:
            key = str(kind), int(_within(batch, 1e6))
            curve = costs._new_curve(key)
            curve.restore(points)
            costs._shapes[key[0]].take(curve)
        for batch, points in state["draft"]:
            costs._draft[int(_within(batch, 1e6))].restore(points)
        if state["positions"] is not None:
            context, points = state["positions"]
            costs._positions.restore(points)
            costs.add_positions(_within(context, 1e9), {})
        seconds, tokens = state.get("follow", (0.0, 0.0))
        costs._follow = _within(seconds, 1e6), _within(tokens, 1e9)
        costs._experts = {int(rows): _within(count, 1e9) for rows, count in state.get("experts", {}).items()}
        return costs


class _Slope:
    """Seconds of each of a count that steps have: positions of a sequence, or experts beyond those that were timed.

    Attributes:
        value: of one.
        reach: the largest count seen.
    """

    __slots__ = ("_weight", "reach", "value")

    def __init__(self, value: float = 0.0, reach: float = 0.0) -> None:
        self.value = value
        self.reach = reach
        self._weight = COST_TRUSTED  # of the observations since the reach grew by far

    def is_far(self, count: float) -> bool:
        """Return whether it lies far beyond all that were seen."""
        return count > COST_FAR * self.reach

    def believes(self, count: float, surprise: float) -> bool:
        """Return whether a step tells more than all before: of a count that is far, or the first after it that are
        faster, as no hiccup makes a step faster. surprise: its seconds over the expected ones."""
        return self.is_far(count) or (surprise < 1 and self._weight < COST_TRUSTED and COST_FAR * count > self.reach)

    def add(self, count: float, error: float, share: float, is_new: bool = False) -> None:
        """Add a step. error: seconds of each beyond the value. is_new: `believes` says so; no one makes it free."""
        if count == 0:
            return
        self._weight = min((0.0 if self.is_far(count) else self._weight) + share, COST_TRUSTED)
        self.reach = max(self.reach, abs(count))
        gain = 1.0 if is_new else share / (COST_MEMORY + share) * (count / self.reach) ** 2
        self.value = max(self.value / COST_CLIP if is_new else 0.0, self.value + gain * error)


def request_kind(requests: Sequence[Request]) -> str:
    """Return the kind of these requests."""
    return KINDS[not all(request.params.greedy for request in requests)]


def bucket(batch: int) -> int:
    """Return the batch size whose curve is shared: each alone up to 4, then four to every doubling."""
    if batch <= 4:
        return batch
    step = 1 << (batch.bit_length() - 3)
    return (batch + step - 1) // step * step


def rounded_rows(rows: int) -> int:
    """Return the rows whose mean is shared: each alone up to 64, then 32 to every doubling. A crowd's choice is about
    single rows of many."""
    step = 1 << max(0, rows.bit_length() - 6)
    return min((rows + step // 2) // step * step, COST_SIZE - 1)


def _nearest(curves: Mapping[tuple[str, int], LearnedCurve], wanted: tuple[str, int]) -> tuple[str, int] | None:
    """Return the key whose curve to read: the wanted one if it was measured, else that of the nearest batch."""
    if curves.get(wanted):
        return wanted
    return min(
        (key for key, curve in curves.items() if curve),
        key=lambda key: (key[0] != wanted[0], abs(key[1] - wanted[1])),
        default=None,
    )


def _within(value: Any, most: float) -> float:
    """Return the number if it lies in 0..most. Raises ValueError otherwise."""
    number = float(value)
    if not 0 <= number <= most:
        raise ValueError(f"{number} lies outside 0..{most}")
    return number


FILE = EntryFile(COSTS_STEM, 5, "measured costs", CostModel.restored, CostModel.state)

_known: dict[str, CostModel] = {}


class StoredCosts:
    """The costs of one setting, which all its engines in this process share.

    Args:
        setting: all that costs depend on, such as models, number format and threads; the machine is added.

    Attributes:
        costs: the present ones.
        is_from_file: another process has measured them, and this one has only just read them.

    Raises:
        ConfigError: FORERUN_COST_CACHE is neither 0 nor 1.
    """

    def __init__(self, setting: tuple[str, ...]) -> None:
        self._key = key_here(setting)
        read = None if self._key in _known else FILE.read().get(self._key)
        self.costs = _known.setdefault(self._key, read or CostModel())
        self.is_from_file = read is not None

    def forget(self) -> None:
        """Begin anew, for engines that are made from now on."""
        self.costs = _known[self._key] = CostModel()

    def save(self) -> None:
        """Write what was measured, beside what other settings have written. Only calibrations do: what is learned in
        use depends on what else the machine does."""
        FILE.put(self._key, self.costs)


def forward_costs(target: str) -> StoredCosts:
    """Return the costs of a target's steps, drafting apart, which all its drafters share. target: what `identity`
    says."""
    return StoredCosts(costs_setting((target, "steps")))


def costs_setting(cost_key: tuple[str, ...]) -> tuple[str, ...]:
    """Return all that costs depend on besides the machine."""
    return (*cost_key, str(torch.get_num_threads()))
