"""A server's journal as one page: what came of each category, with speculation and without."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest

import traffic_world
from forerun.errors import ConfigError
from forerun.lab.bench.journal import journal_results
from forerun.lab.bench.report.markdown import markdown, warnings_of
from forerun.lab.results.files import as_object, load_results, save_results


def test_figures_by_category_and_drafter(tmp_path: Path) -> None:
    found = journal_results(traffic_world.written(tmp_path / "j"))
    values = {(each.name, each.labels["category"], each.labels["method"]): each.value for each in found.figures}
    assert values["acceptance_length", "code", "suffix"] == 101 / 25
    assert values["acceptance_length", "", "suffix"] == pytest.approx(202 / 75)
    assert values["acceptance_rate", "prose", "suffix"] == 51 / 120
    assert ("acceptance_rate", "code", "none") not in values
    assert values["per_token", "code", "suffix"] == pytest.approx(0.02 * 25 / 100)
    assert values["per_token", "code", "none"] == pytest.approx(0.02 * 101 / 100)
    assert values["first_token", "", "none"] == values["first_token_p90", "", "none"] == pytest.approx(0.1)
    assert [row[:3] for row in found.tables[0].rows] == [
        ["all", "none", "6"],
        ["all", "suffix", "12"],
        ["code", "none", "6"],
        ["code", "suffix", "6"],
        ["prose", "suffix", "6"],
    ]
    assert found.tables[0].rows[4][3:] == ["22", "101", "2.02", "42 %", "100.0", "100.0", "10.0", "6.6"]
    assert found.target is not None and found.target.name == "bundled" and found.environment.cores == 2
    save_results(found, tmp_path / "j.json")
    assert as_object(load_results(tmp_path / "j.json")) == as_object(found)


def test_the_page(tmp_path: Path) -> None:
    path = traffic_world.written(tmp_path / "j", model="other")
    traffic_world.written(path)
    text = markdown([journal_results(path)])
    assert text.startswith("## Traffic of a server: bundled, bfloat16\n\n`forerun serve --journal j`")
    assert "Left out: 0 damaged lines and 18 answers of another model or machine" in text
    assert "| code | suffix | 6 |" in text and str(tmp_path) not in text
    assert not [each for each in warnings_of([journal_results(path)]) if "not numbers" in each]


def test_damage_is_an_error_or_a_figure(tmp_path: Path) -> None:
    """Whatever stands in the file, nothing else is raised, and nothing hangs."""
    rng = random.Random(7)
    path = traffic_world.written(tmp_path / "j", traffic_world.ANSWERS[:4])
    whole = path.read_bytes()
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.choice(b'0123456789-.eE,:[]{}"naN \n\xff')
        path.write_bytes(damaged)
        with suppress(ConfigError):
            markdown([journal_results(path)])
