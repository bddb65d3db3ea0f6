"""docs/study.md holds what its committed results say, and tuning comes near the best of a grid."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from forerun.plan.step_times import CostCurve
from forerun.tune.arms import PLAIN, Arm, Trial

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "benchmarks" / "study"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("study_pictures", "tune_grid"):
        sys.modules.pop(name, None)


def test_the_tables_are_made_of_the_committed_results() -> None:
    """`benchmarks/study.sh pictures` writes them."""
    import study_pictures  # type: ignore[import-not-found]

    text = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
    assert study_pictures.filled(text) == text
    assert set(study_pictures.TABLES) == {name for name in study_pictures.TABLES if f"<!-- {name} -->" in text}
    for name in study_pictures.charts():
        assert f"(study/{name}.svg)" in text and (ROOT / "docs" / "study" / f"{name}.svg").is_file()


def test_the_share_of_tokens_that_are_looked_at_and_accepted() -> None:
    from study_pictures import Row

    row = Row("", "draft-model", 2, 0.0, 1, 1.0, 0.5, [0.8, 0.5])
    assert row.per_token == pytest.approx((0.8 + 0.4) / 1.8)
    assert Row("", "suffix", 4, 0.0, 1, 1.0, 0.0, []).per_token == 0


def test_results_and_pictures_stay_small() -> None:
    assert sum(path.stat().st_size for path in STUDY.iterdir()) < 150_000
    assert sum(path.stat().st_size for path in (ROOT / "docs" / "study").iterdir()) < 200_000


def test_tuning_in_a_tenth_of_a_grids_time_comes_near_its_best() -> None:
    """In a grid of invented answers; `tune_grid.py grid` makes real ones."""
    import tune_grid  # type: ignore[import-not-found]

    rng = np.random.default_rng(0)

    def trials(speed: float) -> list[Trial]:
        seconds = 0.3 / speed * np.exp(0.1 * rng.standard_normal(16))
        counts = (30, 120, 40, (30, 20, 10, 5), (20, 10, 5, 5))
        return [Trial(float(each), 64, *counts, draft_seconds=0.05, target_seconds=0.2) for each in seconds]

    arms = tune_grid.arms_of("bundled")
    grid = tune_grid.Grid(
        {**{arm: trials(0.8 + 0.8 * rng.random()) for arm in arms}, PLAIN: [Trial(0.3, 64, 64)] * 16},
        CostCurve([1, 33], [0.004, 0.01]),
    )
    found = [tune_grid.tuned(grid, seed) for seed in range(3)]
    assert all(regret < 0.1 and share <= 0.1 for _, regret, share in found), found
    assert grid.nearest(Arm("suffix", 5)) in (Arm("suffix", 4), Arm("suffix", 6))
    assert grid.nearest(Arm("no-such-drafter", 5)) is None
