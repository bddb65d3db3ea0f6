"""Costs as they are learned, and as they are kept."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import platformdirs
import pytest
from platformdirs import macos, windows

from forerun.config import COST_CACHE_VARIABLE
from forerun.errors import ConfigError
from forerun.speculation import CostModel, StoredCosts, cost_model
from forerun.speculation.cost_model import LearnedCurve, bucket, rounded_rows
from forerun.utils import files
from forerun.utils.files import locked
from forerun.utils.home import HOME_VARIABLE


def learn(curve: LearnedCurve, points: dict[int, float], times: int = 8) -> LearnedCurve:
    for _ in range(times):
        for count, seconds in points.items():
            curve.add(count, seconds)
    return curve


def test_what_was_seen_is_believed() -> None:
    table = learn(LearnedCurve(65), {1: 1.0, 5: 1.5, 17: 3.0}).table()
    assert table[[1, 5, 17]] == pytest.approx([1.0, 1.5, 3.0], rel=0.02)
    assert 1.0 < table[3] < 1.3 and 3.0 < table[30] < 6.5
    assert (np.diff(table) >= 0).all()


def test_costs_that_come_in_steps() -> None:
    table = learn(LearnedCurve(33), {1: 1.0, 4: 1.0, 5: 2.0, 8: 2.0}).table()
    assert table[4] == pytest.approx(1.0, rel=0.02) and table[5] == pytest.approx(2.0, rel=0.02)


def test_more_never_costs_less() -> None:
    rng = np.random.default_rng(0)
    curve = LearnedCurve(65)
    for _ in range(500):
        count = int(rng.integers(1, 40))
        curve.add(count, (1 + 0.01 * count) * float(np.exp(0.3 * rng.standard_normal())))
    assert (np.diff(curve.table()) >= 0).all()
    assert curve.table()[20] == pytest.approx(1.2, rel=0.25)


def test_a_hiccup_does_not_stick_wherever_it_comes() -> None:
    late = learn(LearnedCurve(9), {1: 1.0, 4: 1.2})
    late.add(4, 50.0)
    assert late.table()[4] < 1.6
    early = LearnedCurve(9)
    early.add(4, 50.0)
    early.add(4, 1.0)
    assert early.table()[4] < 1.1
    first_of_its_kind = learn(LearnedCurve(9), {1: 1.0})
    first_of_its_kind.add(4, 50.0)
    assert first_of_its_kind.table()[4] < 3.5


def test_one_point_of_a_drafter_means_in_proportion_of_a_forward_nearly_flat() -> None:
    assert learn(LearnedCurve(9, flat=False), {2: 1.0}).table()[8] == pytest.approx(4.0, rel=0.1)
    assert learn(LearnedCurve(9), {2: 1.0}).table()[8] < 1.3


def test_nothing_at_no_cost_is_no_division() -> None:
    assert np.isfinite(learn(LearnedCurve(9), {0: 0.0, 3: 0.0}).table()).all()


def test_buckets_and_rounding() -> None:
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 32)] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 16, 20, 32]
    assert [rounded_rows(n) for n in (1, 7, 17, 63, 65, 130, 10**6)] == [1, 7, 17, 63, 66, 132, 1024]
    assert all(rounded_rows(rounded_rows(n)) == rounded_rows(n) for n in range(1, 1024))


def test_batches_have_curves_of_their_own_and_borrow_the_nearest() -> None:
    costs = CostModel()
    assert costs.target("greedy", 1, 0) is None
    for _ in range(5):
        costs.add_target("greedy", 1, 10, 1, 1.0)
        costs.add_target("greedy", 8, 10, 8, 2.0)
    one, eight, seven = (costs.target("greedy", batch, 10) for batch in (1, 8, 7))
    assert one is not None and eight is not None and seven is not None
    assert one[1] == pytest.approx(1.0, rel=0.1) and eight[8] == pytest.approx(2.0, rel=0.1)
    assert seven[8] == eight[8]


def test_what_sequences_cost_makes_further_rows_no_cheaper() -> None:
    costs = CostModel()
    for rows in (1, 4, 8, 16, 32):
        costs.add_target("greedy", 1, 10, rows, float(rows), 5)
    for _ in range(50):
        costs.add_target("greedy", 16, 160, 16, 20.0)  # four of them beside the rows
    crowd = costs.target("greedy", 16, 160)
    assert crowd is not None
    assert crowd[16] == pytest.approx(20.0, rel=0.05)
    assert crowd[24] - crowd[16] > 7


def test_context_and_pace_are_no_difference_between_choices() -> None:
    """Plain steps were measured early on; later ones cost more, as the context is longer and the machine busier."""
    costs = CostModel()
    for _ in range(20):
        costs.add_target("greedy", 1, 100, 1, 1.0)
        costs.add_target("greedy", 1, 100, 5, 1.2)
    for step in range(300):
        costs.add_target("greedy", 1, 100 + 4 * step, 5, (1.2 + 0.001 * 4 * step) * (2 if step > 150 else 1))
    now = costs.target("greedy", 1, 1300)
    assert now is not None
    assert now[5] == pytest.approx(4.8, rel=0.2)
    assert now[1] / now[5] > 0.55  # without either it would be 0.2; 0.64 if positions cost the root of the rows


def test_state_goes_round() -> None:
    costs = CostModel()
    for _ in range(10):
        costs.add_target("drawn", 4, 50, 4, 1.0)
        costs.add_target("drawn", 4, 50, 12, 2.0)
    steps = CostModel.restored(json.loads(json.dumps(costs.state())))
    one, two = costs.target("drawn", 4, 50), steps.target("drawn", 4, 50)
    assert one is not None and two is not None and two == pytest.approx(one, rel=0.05)
    for _ in range(10):
        costs.add_draft(4, 2, 0.3)
    other = CostModel.restored(json.loads(json.dumps(costs.state())))
    assert other.target("drawn", 4, 50) is None  # the target's entry has them
    assert other.draft(4, 4) == pytest.approx(costs.draft(4, 4), rel=0.05)
    assert other.largest_draft == 2


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(COST_CACHE_VARIABLE, "1")
    monkeypatch.delenv(HOME_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cost_model, "_known", {})
    monkeypatch.setattr(files, "_warned", set())
    return tmp_path / "forerun" / "costs-5.json"


def test_costs_outlive_the_process(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = StoredCosts(("target", "drafter"))
    first.costs.add_draft(1, 3, 0.5)
    assert StoredCosts(("target", "drafter")).costs is first.costs
    first.save()
    StoredCosts(("target", "another")).save()
    assert [file.name for file in home.parent.iterdir()] == ["costs-5.json"]
    monkeypatch.setattr(cost_model, "_known", {})
    assert StoredCosts(("target", "drafter")).costs.largest_draft == 3
    assert StoredCosts(("other target", "drafter")).costs.largest_draft == 0


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"version": 5}',
        '{"version": 9, "entries": {}}',
        '{"version": 5, "entries": []}',
        "\xff",
    ],
)
def test_a_spoilt_file_is_replaced(home: Path, content: str) -> None:
    home.parent.mkdir()
    home.write_text(content, encoding="latin-1")
    stored = StoredCosts(("a",))
    assert stored.costs.largest_draft == 0
    stored.save()
    assert json.loads(home.read_text())["version"] == 5


@pytest.mark.parametrize(
    "state",
    [
        3,
        {},
        {"target": [], "draft": [[1, {"2": [-1.0, 1.0]}]], "positions": None},
        {"target": 1, "draft": [], "positions": None},
    ],
)
def test_a_spoilt_entry_is_nothing_known(home: Path, state: object, monkeypatch: pytest.MonkeyPatch) -> None:
    StoredCosts(("a",)).save()
    content = json.loads(home.read_text())
    content["entries"] = dict.fromkeys(content["entries"], state)
    home.write_text(json.dumps(content))
    monkeypatch.setattr(cost_model, "_known", {})
    costs = StoredCosts(("a",)).costs
    assert costs.largest_draft == 0 and costs.target("greedy", 1, 0) is None


SOUND = (
    '{"target": [["greedy", 1, {"1": [0.5, 8.0]}]], "draft": [[1, {"2": [0.1, 8.0]}]], '
    '"positions": [9.0, {"1": [0.001, 1.0]}]}'
)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('["greedy", 1,', '["greedy", Infinity,'),
        ('["greedy", 1,', f'["greedy", {10**400},'),
        ("9.0", "NaN"),
        ("9.0", f"{10**400}"),
        ("[[1, {", "[[Infinity, {"),
        ("0.5", f"{10**400}"),
        ("0.5", "NaN"),
        ("8.0", "Infinity"),
        ("9.0", "-1.0"),
        ("0.001", "NaN"),
        ('{"1": [0.001, 1.0]}', "{}"),
        ('{"2": [0.1, 8.0]}', "{}"),
    ],
)
def test_a_damaged_entry_is_left_out_and_not_saved_back(
    home: Path, old: str, new: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("damaged", "sound"):
        StoredCosts((name,)).costs.add_draft(1, 2, 0.1)
        StoredCosts((name,)).save()
    damaged, sound = json.loads(home.read_text())["entries"]
    assert old in SOUND
    bad = SOUND.replace(old, new, 1)
    home.write_text(f'{{"version": 5, "entries": {{"{damaged}": {bad}, "{sound}": {SOUND}}}}}')
    monkeypatch.setattr(cost_model, "_known", {})
    assert StoredCosts(("sound",)).costs.largest_draft == 2
    assert StoredCosts(("damaged",)).costs.largest_draft == 0
    StoredCosts(("sound",)).save()
    assert list(json.loads(home.read_text())["entries"]) == [sound]
    assert [str(home) in record.getMessage() for record in caplog.records] == [True]  # one warning, which names it


@pytest.mark.parametrize("content", ["[" * 100_000, '{"version": 5, "entries": ' + "[" * 100_000, "{", "[]"])
def test_a_damaged_file_is_set_aside_with_one_warning(
    home: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    home.parent.mkdir()
    home.write_text(content)
    for name in ("a", "b"):
        assert StoredCosts((name,)).costs.largest_draft == 0
    assert home.read_text() == content  # reading changes nothing
    StoredCosts(("a",)).save()
    assert home.with_name("costs-5.json.damaged").read_text() == content
    assert json.loads(home.read_text())["version"] == 5
    assert [str(home) in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_stops_nothing(home: Path, make: Callable[[Path], None]) -> None:
    home.parent.mkdir()
    make(home)
    StoredCosts(("a",)).save()
    assert home.is_file()


def test_any_damage_leaves_costs_that_can_be_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = StoredCosts(("a",))
    for rows in (1, 3, 8):
        stored.costs.add_target("greedy", 1, 100.0, rows, 0.01)
        stored.costs.add_draft(1, rows, 0.002)
    stored.save()
    whole, draw = home.read_bytes(), random.Random(4)
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            content[draw.randrange(len(content))] = draw.choice(b'0123456789eE-+.,:[]{}"NaInfity\x00\xff')
        home.write_bytes(content[: draw.randrange(len(content))] if draw.random() < 0.2 else content)
        monkeypatch.setattr(cost_model, "_known", {})
        again = StoredCosts(("a",))
        target = again.costs.target("greedy", 1, 200.0, 8)
        assert target is None or (np.isfinite(target).all() and (target > 0).all())
        assert np.isfinite(again.costs.draft(1, 8)).all()
        again.save()
        json.loads(home.read_text(), parse_constant=pytest.fail)


def test_files_of_other_versions_stay(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    home.parent.mkdir()
    others = [home.with_name(name) for name in ("costs.json", "costs-9.json")]
    for each in others:
        each.write_text('{"version": 9, "entries": {}}')
    stored = StoredCosts(("a",))
    assert stored.costs.largest_draft == 0
    stored.save()
    assert [each.read_text() for each in others] == ['{"version": 9, "entries": {}}'] * 2
    assert home.is_file() and not caplog.records


def test_nobody_loses_what_others_write_meanwhile(home: Path) -> None:
    def save(writer: int) -> None:
        for number in range(12):
            StoredCosts((f"{writer} {number}",)).save()

    with ThreadPoolExecutor(3) as writers:  # the lock keeps threads apart as it does processes
        list(writers.map(save, range(3)))
    assert len(json.loads(home.read_text())["entries"]) == 36
    assert [each.name for each in home.parent.iterdir()] == [home.name]


def test_a_process_that_does_not_let_go_stops_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_LOCK_WAIT", 0.02)
    with locked(home, ConfigError, wait=False):
        StoredCosts(("a",)).save()
    assert not home.exists()
    StoredCosts(("a",)).save()
    assert home.is_file()


def test_a_relative_cache_folder_is_ignored(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    for folder in ("cache", "./cache", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        assert cost_model.FILE.path() == tmp_path / "user" / ".cache" / "forerun" / "costs-5.json"
    StoredCosts(("a",)).save()
    assert [each.name for each in tmp_path.iterdir()] == ["user"]
    monkeypatch.setenv(HOME_VARIABLE, "elsewhere")
    assert cost_model.FILE.path() == tmp_path / "elsewhere" / "costs-5.json"
    monkeypatch.setenv(HOME_VARIABLE, "~/mine")
    assert cost_model.FILE.path() == tmp_path / "user" / "mine" / "costs-5.json"


def test_the_cache_folder_of_other_systems(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(windows, "get_win_folder", lambda name: str(tmp_path / "local"))
    folders = {
        "darwin": (macos.MacOS, tmp_path / "Library" / "Caches" / "forerun"),
        "win32": (windows.Windows, tmp_path / "local" / "forerun" / "Cache"),
    }
    for system, (dirs, folder) in folders.items():
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr(
            platformdirs, "user_cache_path", lambda *args, dirs=dirs, **more: dirs(*args, **more).user_cache_path
        )
        assert cost_model.FILE.path() == folder / "costs-5.json"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "chosen"))
        assert cost_model.FILE.path() == tmp_path / "chosen" / "forerun" / "costs-5.json"
        monkeypatch.delenv("XDG_CACHE_HOME")


def test_a_switch_that_is_none_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COST_CACHE_VARIABLE, "off")
    with pytest.raises(ConfigError, match="FORERUN_COST_CACHE is 'off', but must be one of 0, 1"):
        StoredCosts(("a",))


def test_switched_off_or_not_writable(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(COST_CACHE_VARIABLE, "0")
    StoredCosts(("a",)).save()
    assert not home.exists()
    monkeypatch.setenv(COST_CACHE_VARIABLE, "1")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    StoredCosts(("a",)).save()


def mixture_costs() -> CostModel:
    """Costs of a mixture of 32 experts, of which a row is given to 8: a step of 1 s, 0.05 s for a further expert."""
    timed, costs = CostModel(), CostModel()
    for rows, experts in ((1, 8), (2, 14), (5, 28)):
        timed.add_target("greedy", 1, 16, rows, 0.6 + 0.05 * experts, 5)
        timed.add_experts(rows, experts)
    costs.begin_with(CostModel.restored(json.loads(json.dumps(timed.state()))))
    return costs


def seconds_of(costs: CostModel, rows: int) -> float:
    table = costs.target("greedy", 1, 16, rows + 1)
    assert table is not None
    return float(table[rows])


def test_rows_cost_by_the_experts_that_the_router_lets_expect() -> None:
    costs, none, even = mixture_costs(), np.zeros(32, np.int64), np.ones(32, np.int64)
    costs.expect_experts(none)
    assert seconds_of(costs, 5) == pytest.approx(2.0, rel=0.02)
    costs.expect_experts(100 * even)  # 32 (1 - 0.75^5) = 24.4 of 32, not 28
    assert seconds_of(costs, 5) == pytest.approx(2.0 - 0.05 * 3.6, rel=0.02)
    assert seconds_of(costs, 1) == pytest.approx(1.0, rel=0.02)
    always = np.array([1000] * 8 + [0] * 24)  # all rows to the same
    costs.expect_experts(none)
    costs.expect_experts(always)
    assert seconds_of(costs, 5) == pytest.approx(1.0, rel=0.05)
    costs.expect_experts(none)  # another target of the same name has begun to count
    costs.expect_experts(100 * even)
    assert seconds_of(costs, 5) > 1.7


def test_steps_teach_what_an_expert_costs_and_not_that_rows_are_cheap() -> None:
    costs = mixture_costs()
    for _ in range(20):
        costs.add_target("greedy", 1, 16, 1, 1.0, num_experts=8)
        costs.add_target("greedy", 1, 16, 5, 1.1, num_experts=10)
    assert seconds_of(costs, 5) == pytest.approx(2.0, rel=0.03)  # of 28 experts
    for _ in range(200):
        costs.add_target("greedy", 1, 16, 1, 1.0, num_experts=8)
        costs.add_target("greedy", 1, 16, 5, 1.2 if _ % 2 else 2.0, num_experts=20 if _ % 2 else 28)
    costs.expect_experts(np.zeros(32, np.int64))
    costs.expect_experts(np.array([9] * 8 + [0] * 24))
    assert seconds_of(costs, 5) < 1.1  # 0.1 s an expert
