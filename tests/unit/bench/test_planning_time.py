"""The measurement of planning drives a budget as the engine would."""

from __future__ import annotations

import pytest

from forerun.bench.planning_time import COLUMNS, SITUATIONS, measure
from forerun.policy import FixedBudget


def test_one_row_per_situation() -> None:
    rows = measure(steps=25, rounds=1)
    assert [row.situation for row in rows] == [situation.name for situation in SITUATIONS]
    drafting, plain, several = rows
    assert drafting.num_draft_tokens > 2 and several.num_draft_tokens > 0.5
    assert plain.num_draft_tokens < 0.3
    assert all(0 < row.step <= row.slowest for row in rows)
    assert [COLUMNS["situation"](row) for row in rows] == [row.situation for row in rows]
    assert all(float(COLUMNS[title](row)) >= 0 for row in rows for title in ("plan and observe in ms", "99 %", "K"))


def test_any_budget_may_be_measured() -> None:
    rows = measure(steps=10, rounds=2, situations=SITUATIONS[:1], new=lambda: FixedBudget(3))
    assert rows[0].num_draft_tokens == pytest.approx(3, abs=0.5)
