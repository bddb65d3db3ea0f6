"""Plans by the roofline: memory, bounds, money, and what devices wait for each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from forerun.errors import ConfigError
from forerun.lab.plan.machines import ACCELERATORS, Machine, Overheads, Placed, accelerator, roofline_costs
from forerun.lab.plan.options import PlanOptions
from forerun.lab.plan.shapes import ModelShape, counted_shape, model_shape
from forerun.lab.plan.sheet import BOUND, CALIBRATED, MEASURED, make_plan
from forerun.speculation.predictor import ChainAcceptance, CostsByK
from gguf_files import write_gguf
from gguf_models import tiny
from publications import publish

H100 = ACCELERATORS["h100"]
LLAMA_70B = "70B:layers=80,kv_heads=8,head_dim=128,heads=64"
ACCEPTED = ChainAcceptance((0.75,))


def test_seventy_billion_weights_in_16_bits_take_42_ms_at_least() -> None:
    forward = Placed(model_shape("70B"), H100).forward(rows=1, batch=1, context=0)
    assert forward == pytest.approx(140e9 / 3.35e12)
    assert round(1000 * forward) == 42


def test_rows_are_free_until_arithmetic_is_the_bound() -> None:
    placed = Placed(model_shape("70B"), H100)
    assert placed.forward(8, 1, 0) == placed.forward(1, 1, 0)
    rows = 1000
    assert placed.forward(rows, 1, 0) == pytest.approx(2 * 70e9 * rows / 989e12)


def test_the_cache_is_read_and_counted() -> None:
    placed = Placed(model_shape(LLAMA_70B), H100)
    each = 2 * 80 * 8 * 128 * 2
    assert placed.cache(4096) == 4096 * each
    assert placed.forward(1, 4, 4096) == pytest.approx((140e9 + 4 * 4096 * each) / 3.35e12)
    assert Placed(model_shape("70B"), H100).cache(4096) is None


def test_a_plan_holds_memory_money_and_the_best_k() -> None:
    options = PlanOptions(context=4096, price=3.0)
    plan = make_plan(model_shape(LLAMA_70B), model_shape("1B"), H100, ACCEPTED, options)
    assert plan.source == BOUND
    assert plan.memory.target_weights == 140e9 and plan.memory.draft_weights == 2e9
    assert plan.memory.available == 80e9 and plan.memory.total > 140e9
    best = plan.prediction.best
    assert best is not None and best.speedup > 2
    assert plan.best_speed == pytest.approx(plan.plain_speed * best.speedup)
    plain, fast = plan.per_million(plan.plain_speed), plan.per_million(plan.best_speed)
    assert plain is not None and fast is not None
    assert plain == pytest.approx(3e6 / (3600 * plan.plain_speed)) and plain / fast == pytest.approx(best.speedup)
    json.dumps(plan.as_object())


def test_devices_share_the_weights_and_wait_for_each_other() -> None:
    alone = make_plan(model_shape("70B"), None, H100, ACCEPTED, PlanOptions())
    together = make_plan(model_shape("70B"), None, H100, ACCEPTED, PlanOptions(tensor_parallel=4, sync_ms=5))
    assert together.costs.plain == pytest.approx(alone.costs.plain / 4 + 0.005)
    usual = make_plan(model_shape("70B"), None, H100, ACCEPTED, PlanOptions(tensor_parallel=4))
    assert usual.costs.plain == pytest.approx(alone.costs.plain / 4 + 0.001)


def test_measured_parts_are_added_to_the_bound() -> None:
    costs = Overheads(layer=1e-5, layer_row=1e-6, step=1e-3, token=1e-4)
    here = Machine("here", None, lambda _: 1e10, 1e12, costs)
    shape, draft = counted_shape("a", 10**8), ModelShape("b", 10**7, 10**7, layers=2)
    bound = roofline_costs(Placed(shape, here), Placed(draft, here), 1, 0, 2)
    one = 2e7 / 1e10 + 2 * (1e-5 + 1e-6)
    assert bound.draft == pytest.approx([0, one + 1e-4, 2 * (one + 1e-4)])
    assert bound.rest == [1e-3] * 3 and bound.plain == pytest.approx(2e8 / 1e10 + 1e-3)
    assert make_plan(shape, draft, here, ACCEPTED, PlanOptions()).source == CALIBRATED
    measured = CostsByK(1.0, [1.0, 1.1], [0.0, 0.1], [0.0, 0.0])
    assert make_plan(shape, draft, here, ACCEPTED, PlanOptions(), measured).source == MEASURED


def test_heads_that_draft_in_one_pass_cost_one() -> None:
    shape = ModelShape("head", 10**8, 10**8, one_pass=True)
    drafting = roofline_costs(Placed(counted_shape("a", 10**9), H100), Placed(shape, H100), 1, 0, 4).draft
    assert drafting[0] == 0 and drafting[1] == drafting[4] > 0


def test_a_shape_is_counted_from_a_configuration_alone(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = model_shape(str(tmp_path))
    layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128 + 2 * 64
    assert shape.parameters == 2 * 6400 + 3 * layer + 64
    assert shape.dense == shape.parameters - 6400
    assert (shape.layers, shape.cache_numbers, shape.attention_products) == (3, 3 * 2 * 2 * 16, 3 * 4 * 2 * 16)


def test_quantized_weights_are_counted_as_the_files_have_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tiny("llama")
    file = tmp_path / "file.gguf"
    write_gguf(file, model, "Q8_0")
    write_gguf(tmp_path / "numbers.gguf", model, "F16")
    awq, _ = publish("AWQ", tmp_path / "awq")
    shapes = {str(path): model_shape(str(path)) for path in (file, awq)}
    assert [shape.number_format for shape in shapes.values()] == ["Q8_0", "awq"]
    for path, shape in shapes.items():
        weights = next(Path(path).glob("*.safetensors")) if Path(path).is_dir() else Path(path)
        plan = make_plan(shape, None, H100, ACCEPTED, PlanOptions())
        assert 0.8 * weights.stat().st_size < plan.memory.target_weights <= weights.stat().st_size
        given = make_plan(shape, shape, H100, ACCEPTED, PlanOptions(precision="bfloat16"))
        assert given.memory.target_weights == given.memory.draft_weights == 2 * shape.parameters
        assert given.target.number_format == "bfloat16"
    assert model_shape(str(tmp_path / "numbers.gguf")).weight_bytes == 2  # float16 is served in bfloat16
    (awq / "model.safetensors").unlink()
    assert model_shape(str(awq)).number_format == "bfloat16"  # without weights, as of a configuration alone


def test_experts_are_read_as_far_as_rows_take_them() -> None:
    shape = ModelShape("moe", 100, 20, expert_parameters=80, experts=8, experts_used=2)
    assert shape.multiplied == 40
    assert shape.read(1) == pytest.approx(40)
    assert shape.read(2) == pytest.approx(20 + 80 * (1 - 0.75**2))
    assert 99 < shape.read(100) <= 100


def test_what_cannot_be_planned_says_why() -> None:
    with pytest.raises(ConfigError, match="Did you mean h100"):
        accelerator("h1000")
    with pytest.raises(ConfigError, match="'layer=3'"):
        model_shape("7B:layer=3")
    with pytest.raises(ConfigError, match="--precision is 'int3'"):
        make_plan(model_shape("7B"), None, H100, ACCEPTED, PlanOptions(precision="int3"))
    with pytest.raises(ConfigError, match="batch is 0"):
        PlanOptions(batch=0)
