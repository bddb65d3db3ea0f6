"""Costs of positions: they grow with the rows of a sequence, and a long context is believed when it is first seen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from families import Folders
from forerun.config import COST_CACHE_VARIABLE
from forerun.engine import step_times
from forerun.engine.step_times import (
    CALIBRATION_ROWS,
    POSITION_ORDER,
    POSITION_ROWS,
    POSITION_SECONDS,
    calibrate,
    check_costs,
)
from forerun.models import Forward, LanguageModel, Model, Rows, identity, load_model
from forerun.speculation import AutomaticPolicy, CostModel, DraftChooser
from forerun.speculation.cost_model import COST_REACH, forward_costs
from forerun.utils.home import HOME_VARIABLE
from worlds import World, calibrated, live

POWERS = (0.46, 0.6, 0.79)
ROWS = range(1, 9)


@dataclass(frozen=True)
class Machine:
    """Seconds of a step, about those of a model of 0.5 billion parameters on two cores, by positions to this power."""

    power: float
    position: float = 0.7e-6
    base: float = 6e-3

    def __call__(self, rows: int, context: float, batch: int = 1) -> float:
        power: float = (rows / batch) ** self.power
        return self.base + 1.5e-3 * rows + self.position * context * power

    def calibrated(self, context: int = 4096, error: float = 1.0, saves: bool = False) -> CostModel:
        """Return what an engine begins with. error: factor on what positions cost. saves: it went through a file."""
        steps = CostModel()
        for batch in (1, 4):
            for rows in CALIBRATION_ROWS:
                if rows >= batch:
                    steps.add_target("greedy", batch, 16 * batch, rows, self(rows, 16 * batch, batch), 5)
        if context:
            steps.add_positions(context, {rows: error * self.position * rows**self.power for rows in POSITION_ROWS})
        costs = CostModel()
        costs.begin_with(CostModel.restored(json.loads(json.dumps(steps.state()))) if saves else steps)
        return costs

    def errors(self, costs: CostModel, context: float, batch: int = 1) -> np.ndarray:
        """Return [8] predicted over real seconds, less 1, with so many rows of each sequence."""
        table = costs.target("greedy", batch, context, 8 * batch + 1)
        assert table is not None
        return np.array([table[batch * rows] / self(batch * rows, context, batch) - 1 for rows in ROWS])


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("saves", [False, True])
def test_after_calibration_a_long_context_is_predicted(power: float, saves: bool) -> None:
    machine = Machine(power)
    costs = machine.calibrated(saves=saves)
    for context in (16, 250, 6000, 24000):
        assert abs(machine.errors(costs, context)).max() < 0.05
    assert abs(machine.errors(costs, 4 * 6000, batch=4)).max() < 0.05
    assert abs(machine.errors(machine.calibrated(0), 6000)).max() > 0.3


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("error", [0.2, 3.0])
@pytest.mark.parametrize("rows", [1, 5, 7])
def test_one_step_far_beyond_all_that_was_seen_is_believed(power: float, error: float, rows: int) -> None:
    machine = Machine(power)
    costs = machine.calibrated(1024, error)
    assert not costs.knows("greedy", 1, 20000, rows)
    costs.add_target("greedy", 1, 20000, rows, machine(rows, 20000))
    assert costs.knows("greedy", 1, 20000, 5)
    for context in (250, 6000, 24000):
        assert abs(machine.errors(costs, context)).max() < 0.1


def test_without_calibration_a_far_step_tells_what_a_position_costs() -> None:
    machine = Machine(0.5)
    costs = machine.calibrated(0)
    costs.add_target("greedy", 1, 6000, 1, machine(1, 6000))
    assert abs(machine.errors(costs, 6000)).max() < 0.05
    assert abs(machine.errors(costs, 250)).max() < 0.05


@pytest.mark.parametrize("ratio", [0.5, 0.85, 1.15, 2.0, 4.0, None])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("contexts", [(6000,), (300, 6000, 1500)])
def test_what_positions_cost_stays_within_bounds_where_rows_were_timed_wrongly(
    ratio: float | None, batch: int, contexts: Sequence[int]
) -> None:
    """ratio: factor on what a position costs before several rows; None: none was timed."""
    machine = Machine(0.7)
    costs = machine.calibrated(0)
    if ratio is not None:
        each = {rows: machine.position * rows**0.7 * (ratio if rows > 1 else 1) for rows in POSITION_ROWS}
        costs.add_positions(4096, each)
    paces = []
    for step in range(6000):
        rows, context = batch * (1 + 4 * (step % 2)), batch * contexts[step // 50 % len(contexts)]
        costs.add_target("greedy", batch, context, rows, machine(rows, context, batch))
        paces.append(costs._pace)
    assert min(paces) > 0.5 and max(paces) < 2
    assert abs(paces[-1] / paces[-601] - 1) < 0.01
    assert 0.5 < costs._position.value / machine.position < 2
    assert abs(machine.errors(costs, batch * contexts[-1], batch)[[0, 4]]).max() < 0.35
    assert abs(machine.errors(costs, 4 * contexts[-1], 4)[0]) < 0.35


@pytest.mark.parametrize("timed", [0, 1024])
def test_a_far_step_of_more_rows_than_were_seen_is_no_word_about_positions(timed: int) -> None:
    machine = Machine(0.6, 1e-6)
    costs = machine.calibrated(timed)
    crowd = 18e-3  # where rows alone were expected to cost more
    costs.add_target("greedy", 1, 10000, 64, crowd)
    for step in range(600):
        costs.add_target("greedy", 1, 10000, *((64, crowd) if step % 50 == 49 else (1, machine(1, 10000))))
    assert machine.errors(costs, 10000)[0] == pytest.approx(0, abs=0.05)
    assert costs._pace == pytest.approx(1, abs=0.2)


def test_no_far_step_makes_positions_free() -> None:
    machine = Machine(0.6)
    costs = machine.calibrated(1024)
    costs.add_target("greedy", 1, 20000, 5, machine(5, 0))
    assert costs._position.value > 0.3 * machine.position


def test_several_rows_make_a_position_dearer_but_by_no_more_than_their_number() -> None:
    costs = CostModel()
    costs.add_positions(4096, {1: 2e-13, 5: 1e-6, 8: 5e-6})
    assert all(1 <= each <= rows for rows, each in zip(ROWS, costs._by_rows(1, 9)[1:], strict=True))
    costs = CostModel()
    costs.add_positions(4096, {1: 5e-6, 5: 4.6e-6})
    assert costs._by_rows(2, 11)[2:] == pytest.approx(1)


def test_a_hiccup_in_the_first_far_step_does_not_stick() -> None:
    machine = Machine(0.6)
    costs = machine.calibrated(1024)
    for step in range(5):
        costs.add_target("greedy", 1, 20000 + step, 5, machine(5, 20000) * (1 if step else 10))
    assert abs(machine.errors(costs, 20000)).max() < 0.1


@pytest.mark.parametrize("context", [250, 1500])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_hiccup_at_a_context_that_was_seen_moves_little(context: int, batch: int) -> None:
    machine = Machine(0.6)
    costs = machine.calibrated(1024)
    costs.add_target("greedy", batch, batch * context, 5, 10 * machine(5, batch * context, batch))
    assert abs(machine.errors(costs, context)[[0, 1, 2, 6, 7]]).max() < 0.1


def test_short_contexts_after_a_far_one_do_not_make_positions_free() -> None:
    machine = Machine(0.6)
    costs = machine.calibrated(1024)
    costs.add_target("greedy", 1, 20000, 1, machine(1, 20000))
    costs.add_target("greedy", 1, 250, 1, 0.8 * machine(1, 250))
    assert abs(machine.errors(costs, 20000)).max() < 0.1


def test_a_busy_machine_makes_positions_dearer_too() -> None:
    machine = Machine(0.6)
    costs = machine.calibrated()
    for step in range(200):
        rows = 1 + 4 * (step % 2)
        costs.add_target("greedy", 1, 300 + step, rows, 2 * machine(rows, 300 + step))
    table = costs.target("greedy", 1, 6000, 9)
    assert table is not None and table[[1, 5]] == pytest.approx([2 * machine(rows, 6000) for rows in (1, 5)], rel=0.1)


def test_what_was_first_seen_at_a_long_context_is_predicted_at_a_short_one() -> None:
    machine = Machine(0.6)
    costs = machine.calibrated()
    for _ in range(5):
        costs.add_target("drawn", 3, 18000, 15, machine(15, 18000, 3))
    table = costs.target("drawn", 3, 300, 16)
    assert table is not None and table[15] == pytest.approx(machine(15, 300, 3), rel=0.02)


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("accept", [0.2, 0.5, 0.8])
def test_at_a_long_context_k_is_right_from_the_first_step(power: float, accept: float) -> None:
    machine = Machine(power, 3e-6)
    world = World(
        lambda *_: accept, lambda k, batch: 1e-4 * k, lambda rows: machine(rows, 6100), prompt=6000, length=1000
    )

    def speed(costs: CostModel) -> float:
        costs.take_drafts(calibrated(world).costs)
        policy = AutomaticPolicy(DraftChooser(costs, acceptance=((accept,), (accept,))))
        return live(world, policy, 200).speed()

    short, long, there = map(speed, (machine.calibrated(0), machine.calibrated(), calibrated(world).costs))
    assert long >= 0.985 * max(there, 1 / machine(1, 6100))
    assert short >= 0.9 * long  # the first far step tells


def calibrated_costs(target: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> CostModel:
    monkeypatch.setattr("forerun.speculation.cost_model._known", {})
    calibrate(target)
    return forward_costs(identity(target)).costs


@pytest.mark.parametrize(("kernels", "forty", "twenty"), [("native", 1020, 510), ("reference", 510, 255)])
def test_positions_are_timed_in_what_the_pool_has(
    kernels: str, forty: int, twenty: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "reference":  # whose caches double
        monkeypatch.setenv("FORERUN_KERNELS", kernels)
    monkeypatch.setattr(step_times, "_position_costs", lambda samples: dict.fromkeys(samples, 1e-3))
    target = load_model("bundled")
    assert target.pool is not None
    for num_pages, reach in ((None, 2040), (40, forty), (20, twenty), (4, COST_REACH)):
        target.pool.limit(num_pages)
        costs = calibrated_costs(target, monkeypatch)
        assert costs._position.reach == reach
        assert [bool(costs._positions.weight(rows)) for rows in POSITION_ROWS[:2]] == [reach != COST_REACH] * 2
        assert target.pool.num_taken == 0


def test_a_model_with_recurrent_layers_is_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "_position_costs", lambda samples: dict.fromkeys(samples, 1e-3))
    target = load_model(Folders(tmp_path)["qwen3_5_text"], "float32")
    assert calibrated_costs(target, monkeypatch)._position.reach > COST_REACH


class Clock:
    """Replaces a model's forwards and the clock that times them: a forward takes what the machine says, times the next
    factor, 1 after the last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: LanguageModel, machine: Machine) -> None:
        self.now = 0.0
        self.num_forwards = 0
        self.factors: list[float] = []
        compute = type(target).forward

        def forward(model: Model, batch: Sequence[Rows]) -> Forward:
            (rows,) = batch
            self.num_forwards += 1
            self.now += machine(len(rows.token_ids), rows.cache.length) * (self.factors.pop(0) if self.factors else 1)
            return compute(model, batch)

        monkeypatch.setattr(type(target), "forward", forward)
        monkeypatch.setattr(step_times, "perf_counter", lambda: self.now)


def test_positions_cost_what_later_forwards_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    target, machine = load_model("bundled"), Machine(0.6, 5e-7)
    clock = Clock(monkeypatch, target, machine)
    clock.factors = [1.5, *[1.0] * 24, 1.5]
    length, found = step_times._positions(target, POSITION_ORDER)
    assert length == 2040
    assert found == pytest.approx({rows: 5e-7 * rows**0.6 for rows in POSITION_ROWS})
    assert clock.num_forwards == 26


@pytest.mark.parametrize(("base", "num_forwards", "is_found"), [(6e-3, 26, True), (0.08, 10, True), (0.3, 4, False)])
def test_timing_positions_ends_when_its_time_is_over(
    base: float, num_forwards: int, is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_model("bundled")
    clock = Clock(monkeypatch, target, Machine(0.6, base / 12000, base))
    _, found = step_times._positions(target, POSITION_ORDER)
    assert clock.num_forwards == num_forwards and clock.now < POSITION_SECONDS + 4 * base
    assert len(found) > 1 if is_found else len(found) < 2


@pytest.mark.parametrize(("seconds", "is_timed"), [(0.09, True), (0.11, False)])
def test_large_models_learn_in_use_what_positions_cost(
    seconds: float, is_timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = CostModel()
    found = {1: 1e-6, 5: 2e-6}
    monkeypatch.setattr(step_times, "_time_rows", lambda *_: {1: [(seconds, 0)]})
    monkeypatch.setattr(step_times, "_positions", lambda *_: (1000, found))
    step_times._calibrate_steps(load_model("bundled"), costs)
    assert bool(costs._positions) is is_timed
    found.popitem()
    costs = CostModel()
    step_times._calibrate_steps(load_model("bundled"), costs)
    assert not costs._positions  # one row count tells no ratio


def pairs(more: float, *shares: float) -> list[tuple[float, float]]:
    """Return seconds of forwards before few and many positions, with these shares of noise."""
    return [(6e-3, 6e-3 + more), *((6e-3 * (1 + share), 6e-3 * (1 + share) + more) for share in shares)]


@pytest.mark.parametrize(
    "samples",
    [
        {1: pairs(0.0, 0.0), 5: pairs(11.7e-6 * 4080, 0.01)},
        {1: pairs(1e-9, 0.0), 5: pairs(6e-3, 0.01)},
        {1: pairs(-1e-3, 0.0), 5: pairs(6e-3, 0.01)},
        {1: pairs(6.9e-3, 0.01), 5: pairs(2.3e-3, 0.01)},
        {1: pairs(2e-3, 0.01), 5: pairs(5e-3, 0.01), 8: pairs(3e-3, 0.01)},
        {1: pairs(2e-3, 0.01), 5: pairs(5e-3, 0.5)},
        {1: pairs(2e-3), 5: pairs(5e-3)},
        {},
    ],
)
def test_a_machine_too_busy_to_tell_what_positions_cost(samples: dict[int, list[tuple[float, float]]]) -> None:
    assert step_times._position_costs(samples) == {}


def test_two_forwards_that_agree_tell_what_positions_cost() -> None:
    samples = {5: pairs(5e-3, 0.05, 9.0), 1: pairs(2e-3, 2.0, 0.01), 8: pairs(4.9e-3, 0.02), 2: pairs(1.0)}
    assert step_times._position_costs(samples) == pytest.approx({1: 2e-3, 5: 5e-3, 8: 4.9e-3})


@pytest.mark.parametrize(("now", "is_kept"), [(1.0, True), (1.7, True), (0.1, False), (13.0, False), (None, True)])
@pytest.mark.parametrize("pace", [1.0, 3.0])
def test_stored_costs_of_positions_are_checked(
    now: float | None, is_kept: bool, pace: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, machine = load_model("bundled"), Machine(0.6)
    monkeypatch.setenv(COST_CACHE_VARIABLE, "1")
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    monkeypatch.setattr("forerun.speculation.cost_model._known", {})
    stored = forward_costs(identity(target))
    stored.costs.begin_with(machine.calibrated())
    stored.save()
    monkeypatch.setattr("forerun.speculation.cost_model._known", {})
    seconds = {rows: [(pace * machine(rows, 16), 0)] for rows in (1, 5)}
    monkeypatch.setattr(step_times, "_time_rows", lambda *_, **__: seconds)
    found = {} if now is None else {1: pace * now * machine.position}
    monkeypatch.setattr(step_times, "_positions", lambda *_: (1000, found))
    check_costs(target)
    assert (forward_costs(identity(target)).costs.target("greedy", 1, 16) is not None) is is_kept
