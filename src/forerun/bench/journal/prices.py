"""What a step takes, by what it does: fitted to the steps of a journal.

The fit is by least squares with no negative coefficient, over steps that are alike, each weighed by how many there
were; of steps that are frequent the measured mean then takes the place of the fit's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from forerun.traffic.records import Steps, class_of_rows

FREQUENT = 30
"""Steps of one kind whose mean is trusted more than the fit."""
_BENDS = (8, 32)
"""Rows from which on each may cost more."""
_ROUNDS = 4000
_SETTLED = 1e-10


@dataclass(frozen=True, slots=True)
class Work:
    """What one step does.

    Attributes:
        decoding: sequences past their prompts.
        draft_rows: draft tokens of all of them.
        prompt_rows: rows of prompts.
        positions: in the caches, summed.
        drafts: whether there is a drafter.
        share: of such steps that have draft tokens; the others have none.
    """

    decoding: int
    draft_rows: float = 0.0
    prompt_rows: float = 0.0
    positions: float = 0.0
    drafts: bool = True
    share: float = 1.0

    @property
    def rows(self) -> float:
        """Of the target's forward."""
        return self.decoding + self.draft_rows + self.prompt_rows


def _target(work: Work) -> list[float]:
    rows = work.rows
    return [1.0, float(rows > 1), rows, *(max(rows - bend, 0.0) for bend in _BENDS), work.positions]


def _rest(work: Work) -> list[float]:
    return [1.0, work.decoding, work.draft_rows, float(work.prompt_rows > 0), work.prompt_rows]


def _draft(work: Work) -> list[float]:
    if not work.drafts:
        return [0.0] * 4
    return [1.0, work.decoding, float(work.draft_rows > 0), work.draft_rows]


_PARTS: Mapping[str, Callable[[Work], list[float]]] = {"target": _target, "rest": _rest, "draft": _draft}


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds of a step.

    Attributes:
        coefficients: of each part.
        measured: (sequences, class of draft tokens) -> the mean of frequent steps without prompts over the fit's.
        residual: share of the journal's seconds that the fit puts into wrong kinds of steps.
    """

    coefficients: Mapping[str, Sequence[float]]
    measured: Mapping[tuple[int, int], float]
    residual: float

    @classmethod
    def of(cls, steps: Sequence[Steps], drafts: bool) -> Prices:
        """The prices of a journal's steps. drafts: its server had a drafter."""
        steps = [each for each in steps if each.count]
        works = [work_of(each, drafts) for each in steps]
        weights = np.sqrt([each.count for each in steps])
        coefficients = {}
        for name, features in _PARTS.items():
            seconds = np.array([_seconds(each, name) / each.count for each in steps])
            table = np.array([features(work) for work in works])
            coefficients[name] = tuple(non_negative_fit(table * weights[:, None], seconds * weights))
        bare = cls(coefficients, {}, 0.0)
        fitted = [bare(work) * each.count for work, each in zip(works, steps, strict=True)]
        wrong = sum(abs(made - each.total) for made, each in zip(fitted, steps, strict=True))
        measured = {
            (each.decoding, each.drafted): each.total / made
            for made, each in zip(fitted, steps, strict=True)
            if not each.prompt and made > 0 and each.count >= FREQUENT
        }
        whole = sum(each.total for each in steps)
        return cls(coefficients, measured, wrong / whole if whole else 0.0)

    def __call__(self, work: Work) -> float:
        """Seconds of a step; of steps that draft now and then, the mean."""
        if 0 < work.share < 1:
            with_drafts = replace(work, draft_rows=work.draft_rows / work.share, share=1.0)
            return work.share * self(with_drafts) + (1 - work.share) * self(replace(work, draft_rows=0.0, share=1.0))
        fitted = sum(
            sum(factor * value for factor, value in zip(self.coefficients[name], features(work), strict=True))
            for name, features in _PARTS.items()
        )
        if work.prompt_rows or not work.drafts:
            return fitted
        return fitted * self.measured.get((work.decoding, class_of_rows(round(work.draft_rows))), 1.0)

    def plain(self, work: Work) -> float:
        """Seconds of the same step where nothing is drafted, and there is no drafter to be told anything."""
        bare = Work(work.decoding, 0.0, work.prompt_rows, work.positions, drafts=False)
        return self(bare) * (self.measured.get((work.decoding, 0), 1.0) if not work.prompt_rows else 1.0)

    def has_plain(self, decoding: int) -> bool:
        """Whether steps of so many sequences without drafts were frequent in the journal."""
        return (decoding, 0) in self.measured


def work_of(each: Steps, drafts: bool) -> Work:
    """What the mean of alike steps does."""
    count = max(each.count, 1)
    return Work(each.decoding, each.draft_rows / count, each.prompt_rows / count, each.positions / count, drafts)


def non_negative_fit(table: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The coefficients c >= 0 of the least |table c - values|², by coordinate descent on the normal equations."""
    scale = np.sqrt((table**2).sum(0))
    used = scale > 0
    scaled = table[:, used] / scale[used]
    gram, wanted = scaled.T @ scaled, scaled.T @ values
    found = np.zeros(len(wanted))
    for _ in range(_ROUNDS):
        before = found.copy()
        for place in range(len(found)):
            found[place] = max(found[place] + (wanted[place] - gram[place] @ found) / gram[place, place], 0.0)
        if np.abs(found - before).max(initial=0.0) <= _SETTLED * max(np.abs(found).max(initial=0.0), 1e-300):
            break
    made = np.zeros(table.shape[1])
    made[used] = found / scale[used]
    return made


def _seconds(each: Steps, part: str) -> float:
    if part == "rest":
        return max(each.total - each.target - each.draft, 0.0)
    return each.target if part == "target" else each.draft
