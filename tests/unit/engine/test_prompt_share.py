"""Rows of prompts beside answers: as many as a step's clients bear."""

from __future__ import annotations

import pytest

from forerun.engine.results import StepStats
from forerun.engine.scheduler import DELAY, MAX_ROWS, MIN_ROWS, PromptShare

FIXED, ROW = 0.016, 0.001


def step(prompts: int, answers: int) -> StepStats:
    """What such a step tells, where every row costs the same."""
    rows = prompts + answers
    return StepStats(num_rows=rows, num_prompt_rows=prompts, time_total=FIXED + ROW * rows)


def taught(*steps: tuple[int, int]) -> PromptShare:
    share = PromptShare(adaptive=True)
    for prompts, answers in steps * 40:
        share.observe(step(prompts, answers))
    return share


@pytest.mark.parametrize("answering", [1, 8, 32, 100])
@pytest.mark.parametrize("steps", [((0, 1), (16, 1)), ((0, 8), (40, 8)), ((256, 0), (0, 1), (30, 32))], ids=str)
def test_prompts_lengthen_a_step_by_so_much_and_no_more(answering: int, steps: tuple[tuple[int, int], ...]) -> None:
    rows = taught(*steps).rows(answering, is_watched=True)
    alone, together = step(0, answering).time_total, step(rows, answering).time_total
    assert together <= (1 + 1.1 * DELAY) * alone
    assert together >= (1 + 0.85 * DELAY) * alone


def test_a_crowd_that_has_always_a_prompt_is_not_starved() -> None:
    """Steps without prompts were seen with one sequence alone."""
    share = taught((0, 1), (16, 1))
    for _ in range(40):
        share.observe(step(40, 32))
    assert share.rows(32, is_watched=True) >= 50


def test_the_bounds() -> None:
    assert PromptShare(adaptive=True).rows(8, is_watched=True) == MAX_ROWS  # nothing is known yet
    assert taught((0, 1), (16, 1)).rows(8, is_watched=False) == MAX_ROWS
    slow = PromptShare(adaptive=True)
    slow.observe(StepStats(num_rows=1, time_total=0.001))
    slow.observe(StepStats(num_rows=65, num_prompt_rows=64, time_total=1.0))
    assert slow.rows(1, is_watched=True) == MIN_ROWS
    fast = PromptShare(adaptive=True)
    fast.observe(StepStats(num_rows=1, time_total=1.0))
    fast.observe(StepStats(num_rows=65, num_prompt_rows=64, time_total=1.001))
    assert fast.rows(1, is_watched=True) == MAX_ROWS  # however little a row adds
    fixed = PromptShare(adaptive=False)
    for each in (step(0, 1), step(16, 1)):
        fixed.observe(each)
    assert fixed.rows(8, is_watched=True) == MAX_ROWS
