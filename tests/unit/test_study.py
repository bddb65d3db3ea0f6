"""docs/study.md holds what its committed results say, and tuning comes near the best of the committed grids."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "benchmarks" / "study"
GRIDS = sorted((ROOT / "benchmarks" / "tune").glob("grid-*.json"))


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


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_tuning_in_a_tenth_of_the_grids_time_comes_near_its_best(path: Path) -> None:
    import tune_grid  # type: ignore[import-not-found]

    grid = tune_grid.Grid.read(path)
    for seed in range(3):
        _, regret, share = tune_grid.tuned(grid, seed)
        assert regret <= 0.03
        assert share <= 0.1
