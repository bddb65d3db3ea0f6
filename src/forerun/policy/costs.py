"""What a step costs by what it does, learned while it is done."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from forerun.config import MAX_NUM_DRAFT_TOKENS
from forerun.policy.curve import COST_CLIP, COST_MEMORY, Curve, Table

COST_SIZE = 1025
"""Rows of a forward, up to which their number changes its estimated cost."""
COST_PACE = 0.1
"""Power of the ratio of measured over expected seconds by which the machine's pace moves at each step."""
COST_TRUSTED = 4.0
"""Observations of a row count before its steps move the pace."""
CATCH_UP_SHARE = 0.05
"""Share of a draft's cost that catching up with a token is taken to have while only a first draft was seen."""
FIRST_SHARE = 0.25
"""Weight of such a first draft."""
FIRST_CLEAR = 1.25
"""Factor by which it must be below the usual cost to count as a sign of a lower one: half of them are, a little."""
COST_GROWTH = 0.5
"""Power of the number of sequences with which drafting is taken to grow while only one number was seen."""


class CostModel:
    """Seconds of a step's parts: the target by rows, batch and context, the drafter by nodes asked of it.

    Two things move all costs together and must not be mistaken for a difference between budgets: the context grows,
    and the machine's speed changes. Context has a slope, and the machine a pace, by which every observation
    is divided before it is learned.

    A batch has a curve over rows of its own, in the shape of all batches' together wherever it was not measured: what
    further rows cost at one batch size is known at every other. Drafting grows with a power of the number of
    sequences, taken from two numbers that were seen.
    """

    def __init__(self) -> None:
        self._target: dict[tuple[str, int], Curve] = {}
        self._shapes: dict[str, Curve] = {}  # by kind, of all batches together
        self._draft: defaultdict[int, Curve] = defaultdict(partial(Curve, MAX_NUM_DRAFT_TOKENS + 1, flat=False))
        self._idle = Curve(1)
        self._catch_up = (0.0, 0.0)  # seconds and tokens, of which earlier ones have lost weight
        self._following = (0.0, 0.0)  # the same of what was computed with before a first draft asked for it
        self._context: dict[tuple[str, int], float] = {}
        self._slope = _Slope()
        self._pace = 1.0

    def target(self, kind: str, batch: int, context: float, most: int = COST_SIZE) -> Table | None:
        """[most at most] seconds by rows of a step without prompt chunks; None if no such step was seen.

        Args:
            kind: of requests, "greedy" or "drawn": what logits cost after the forward depends on it.
            batch: sequences.
            context: positions in their caches, summed.
            most: row counts that are of interest.
        """
        key = _nearest(self._target, (kind, bucket(batch)))
        if key is None:
            return None
        table = self._target[key].table(most)[:most] * self._pace
        extra = self._slope.value * (context - self._context[key])
        return table + extra if extra >= 0 else np.maximum(table + extra, table / 4)

    def seen_rows(self, kind: str, batch: int, rows: int) -> float:
        """Observations of steps of so many rows, as they are weighted now."""
        curve = self._target.get((kind, bucket(batch)))
        return 0.0 if curve is None else curve.weight(rounded(rows))

    def draft(self, batch: int, places: int) -> Table:
        """[places + 1] seconds in the drafter by the largest budget of `batch` sequences; zeros if none was measured.

        At 0 it is not asked, and the cost is that of being told what happened.
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
        """Power of the number of sequences with which drafting grows, from 0 to 1."""
        seen = sorted(key for key, curve in self._draft.items() if curve)
        if len(seen) < 2:
            return COST_GROWTH
        few, many = seen[0], seen[-1]
        most = min(self._draft[few].largest, self._draft[many].largest) + 1
        low, high = (float(self._draft[key].table(most)[1:most].sum()) for key in (few, many))
        return min(max(math.log(max(high, 1e-12) / max(low, 1e-12)) / math.log(many / few), 0.0), 1.0)

    @property
    def largest_draft(self) -> int:
        """The largest budget that was tried."""
        return max((curve.largest for curve in self._draft.values()), default=0)

    def add_target(self, kind: str, batch: int, context: float, rows: int, seconds: float, share: float = 1.0) -> None:
        """A step without prompt chunks has been computed: forward, verdicts and what the engine did besides.

        share: its weight; n where context and seconds are the means of n such steps.
        """
        key, rows = (kind, bucket(batch)), rounded(rows)
        curve = self._target.get(key)
        if curve is None:
            curve = self._new_curve(key)
            self._context[key] = context
        distance = context - self._context[key]
        if curve.weight(rows) >= COST_TRUSTED:
            expected = max(float(curve.table(rows + 1)[rows]) * self._pace + self._slope.value * distance, 1e-9)
            surprise = min(max(seconds / expected, 1 / COST_CLIP), COST_CLIP)
            self._pace *= surprise ** (1 - (1 - COST_PACE) ** share)
            self._slope.add(distance, (seconds - expected) / self._pace, share)
        paced = seconds / self._pace
        seconds = max(paced - self._slope.value * distance, paced / 4)
        curve.add(rows, seconds, share)
        self._shapes[kind].add(rows, seconds, share)

    def add_draft(self, batch: int, budget: int, seconds: float, share: float = 1.0) -> None:
        """A drafter has been asked for at most `budget` nodes of each of `batch` sequences."""
        self._draft[bucket(batch)].add(budget, seconds / self._pace, share)

    def add_first_draft(self, batch: int, budget: int, lag: int, seconds: float) -> None:
        """The same after a pause: what exceeds the usual cost was for `lag` tokens that had come meanwhile."""
        paced, curve = seconds / self._pace, self._draft.get(bucket(batch))
        if curve:
            usual = float(curve.table(budget + 1)[budget])
            self._catch_up = _added(self._catch_up, max(paced - usual, 0.0), lag)
            if paced * FIRST_CLEAR < usual:  # without catching up it would have been even less
                curve.add(budget, paced, FIRST_SHARE)
            return
        lacking = 0 if self._following[0] else lag  # prompts that were followed have been computed with already
        at_least = paced / (1 + CATCH_UP_SHARE * lacking)
        elsewhere = float(self.draft(batch, budget)[budget]) / self._pace  # as other batches have it; 0 without any
        self._draft[bucket(batch)].add(budget, max(at_least, min(elsewhere, paced)), FIRST_SHARE)

    def add_following(self, seconds: float, tokens: int) -> None:
        """A drafter that might have put it off has computed with prompts beside the target.

        Args:
            seconds: in the drafter, in steps that held prompts and in which nobody drafted.
            tokens: of the sequences that came with these steps, computed or taken over from others.
        """
        idle = float(self._idle.table()[0]) if self._idle else 0.0
        self._following = _added(self._following, max(seconds / self._pace - idle, 0.0), tokens)

    def catch_up(self, lag: int) -> float:
        """Seconds that drafting costs more where so many tokens have come since the sequence drafted; those that were
        spent before the first draft, to follow it, included."""
        return (
            self._pace * lag * sum(seconds / tokens for seconds, tokens in (self._catch_up, self._following) if tokens)
        )

    def add_idle(self, seconds: float, share: float = 1.0) -> None:
        """A step has passed in which the drafter was not asked; it was told what happened."""
        self._idle.add(0, seconds / self._pace, share)

    def _new_curve(self, key: tuple[str, int]) -> Curve:
        shape = self._shapes.setdefault(key[0], Curve(COST_SIZE))
        curve = self._target[key] = Curve(COST_SIZE, shape=shape)
        return curve

    def state(self) -> dict[str, Any]:
        """All of it as plain numbers, for the next process."""
        return {
            "target": [[*key, self._context[key], curve.state()] for key, curve in self._target.items() if curve],
            "draft": [[key, curve.state()] for key, curve in self._draft.items() if curve],
            "slope": self._slope.value,
            "catch_up": list(self._catch_up),
            "following": list(self._following),
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> CostModel:
        """A model that begins with what `state` once gave.

        Raises:
            ValueError, TypeError, KeyError, AttributeError, OverflowError: it is something else.
        """
        costs = cls()
        for kind, batch, context, points in state["target"]:
            key = str(kind), int(_within(batch, 1e6))
            curve = costs._new_curve(key)
            curve.restore(points)
            costs._shapes[key[0]].take(curve)
            costs._context[key] = _within(context, 1e9)
        for batch, points in state["draft"]:
            costs._draft[int(_within(batch, 1e6))].restore(points)
        costs._slope.value = _within(state["slope"], 1.0)
        costs._catch_up, costs._following = _account(state, "catch_up"), _account(state, "following")
        return costs


class _Slope:
    """Seconds per position of context, by regression of the surprises on the distance from where a curve began."""

    __slots__ = ("_xx", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._xx = 0.0

    def add(self, distance: float, surprise: float, share: float) -> None:
        if distance == 0:
            return
        square = distance * distance
        self._xx = self._xx * (1 - 1 / COST_MEMORY) ** share + share * square
        self.value = max(0.0, self.value + share * distance * surprise / (self._xx + COST_MEMORY * square))


def bucket(batch: int) -> int:
    """Batches that share a curve: each alone up to 4, then four to every doubling."""
    if batch <= 4:
        return batch
    step = 1 << (batch.bit_length() - 3)
    return (batch + step - 1) // step * step


def rounded(rows: int) -> int:
    """Rows that share a mean: each alone up to 16, then eight to every doubling."""
    step = 1 << max(0, rows.bit_length() - 4)
    return min((rows + step // 2) // step * step, COST_SIZE - 1)


def _nearest(curves: Mapping[tuple[str, int], Curve], wanted: tuple[str, int]) -> tuple[str, int] | None:
    """The key whose curve to read: the wanted one if it was measured, else that of the nearest batch."""
    if curves.get(wanted):
        return wanted
    return min(
        (key for key, curve in curves.items() if curve),
        key=lambda key: (key[0] != wanted[0], abs(key[1] - wanted[1])),
        default=None,
    )


def _added(account: tuple[float, float], seconds: float, tokens: int) -> tuple[float, float]:
    """Seconds and tokens, with more of them; those before lose weight."""
    kept = 1 - 1 / COST_MEMORY
    return account[0] * kept + seconds, account[1] * kept + tokens


def _account(state: Mapping[str, Any], name: str) -> tuple[float, float]:
    """Seconds and tokens, if the state has any."""
    seconds, tokens = state.get(name, (0.0, 0.0))
    return _within(seconds, 1e6), _within(tokens, 1e9)


def _within(value: Any, most: float) -> float:
    """The number, if it lies in 0..most; a ValueError otherwise."""
    number = float(value)
    if not 0 <= number <= most:
        raise ValueError(f"{number} lies outside 0..{most}")
    return number
