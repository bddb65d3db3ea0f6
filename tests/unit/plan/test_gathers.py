"""What a gather costs, in `forerun plan`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.errors import ConfigError
from forerun.plan.gathers import GatherCost
from forerun.plan.machines import accelerator
from forerun.plan.options import PlanOptions
from forerun.plan.predictor import ChainAcceptance
from forerun.plan.roofline import Placed
from forerun.plan.shapes import model_shape
from forerun.plan.sheet import by_degree, make_plan
from forerun.results import Figure, Results
from forerun.results.write import save
from measured import QUIET

TARGET = "70B:layers=80,kv_heads=8,head_dim=128,heads=64,hidden=8192,vocab=128256"
HALF = ChainAcceptance((0.5,))


def test_a_forward_has_two_gathers_a_layer_and_one_for_the_logits() -> None:
    shape, machine = model_shape(TARGET), accelerator("h100")
    without = Placed(shape, machine, devices=4, gather=GatherCost(0.0)).forward(2, 3, 100)
    placed = Placed(shape, machine, devices=4, gather=GatherCost(1e-5, 1e9))
    states, logits = 4 * 6 * 8192 * 3 / 1e9, 4 * 6 * 128256 / 4 * 3 / 1e9
    assert placed.forward(2, 3, 100) - without == pytest.approx(160 * (1e-5 + states) + 1e-5 + logits)
    assert Placed(shape, machine, gather=GatherCost(1.0)).forward(1, 1, 100) < 1.0  # one device waits for nobody


def test_the_degree_that_pays_depends_on_the_cost() -> None:
    target, machine = model_shape(TARGET), accelerator("h100")

    def fastest(microseconds: float) -> int:
        options = PlanOptions(gather_us=microseconds, tensor_parallel=2)
        plans = by_degree(target, None, machine, HALF, options)
        assert list(plans) == [1, 2, 4, 8]
        return max(plans, key=lambda count: plans[count].best_speed)

    assert fastest(5) == 8
    assert fastest(1000) == 1


def test_there_are_no_more_devices_than_key_heads() -> None:
    target = replace(model_shape(TARGET), kv_heads=3)
    assert list(by_degree(target, None, accelerator("h100"), HALF, PlanOptions(gather_us=1.0))) == [1, 2]


def test_layers_must_be_known() -> None:
    with pytest.raises(ConfigError, match="how many layers"):
        make_plan(model_shape("70B"), None, accelerator("h100"), HALF, PlanOptions(gather_us=1.0, tensor_parallel=2))


def test_the_waiting_is_said_once() -> None:
    with pytest.raises(ConfigError, match="--sync-ms and --gather-us"):
        PlanOptions(sync_ms=1.0, gather_us=1.0)


def written(folder: Path, figures: list[Figure]) -> Path:
    path = folder / "gathers.json"
    save(Results(kind="collectives", command="forerun bench collectives", environment=QUIET, figures=figures), path)
    return path


def test_a_line_is_laid_through_what_was_measured(tmp_path: Path) -> None:
    figures = [Figure("gather", {"ranks": 3, "bytes": size}, 2e-4 + 2 * size / 1e9) for size in (4096, 32768, 262144)]
    cost = GatherCost.of_file(written(tmp_path, [*figures, Figure("gather_p99", {"ranks": 3, "bytes": 1}, 9.0)]))
    assert cost.latency == pytest.approx(2e-4)
    assert cost.bandwidth == pytest.approx(1e9)
    assert cost.seconds(1000, 3) == pytest.approx(2e-4 + 2e-6)


@pytest.mark.parametrize("values", [[3e-4], [3e-4, 2e-4]])
def test_few_or_odd_figures_give_their_mean(tmp_path: Path, values: list[float]) -> None:
    figures = [Figure("gather", {"ranks": 2, "bytes": 4096 * (n + 1)}, value) for n, value in enumerate(values)]
    cost = GatherCost.of_file(written(tmp_path, figures))
    assert cost.seconds(1e6, 2) == pytest.approx(sum(values) / len(values))


@pytest.mark.parametrize("figure", [Figure("forward", {}, 1.0), Figure("gather", {"ranks": "two", "bytes": 1}, 1.0)])
def test_other_files_are_refused(tmp_path: Path, figure: Figure) -> None:
    with pytest.raises(ConfigError, match="forerun bench collectives"):
        GatherCost.of_file(written(tmp_path, [figure]))
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({"format": "x"}))
    with pytest.raises(ConfigError):
        GatherCost.of_file(broken)
