from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from forerun.errors import ConfigError
from forerun.train import folder
from tools.lm import build_model, train_tokenizer
from tools.padded import Padding, make_padded, pad, parse_parameters, plan

from .conftest import TINY


def tiny(dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    return build_model(TINY, end_token=0, seed=1).to(dtype).eval()


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(40).view(2, 20)).logits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_extra_layers_change_no_bit(dtype: torch.dtype) -> None:
    model = tiny(dtype)
    padded = pad(model, Padding(5, TINY.intermediate_size, 0))
    assert padded.num_parameters() > model.num_parameters()
    assert torch.equal(logits(model), logits(padded))


def test_wider_layers_give_equal_logits_in_float64() -> None:
    model = tiny()
    padded = pad(model, Padding(3, 192, 0))
    assert torch.allclose(logits(model), logits(padded), rtol=0, atol=1e-12)


def test_the_plan_counts_parameters_as_the_model_does() -> None:
    model = tiny()
    padding = plan(model.config, model.num_parameters(), 400_000, num_layers=4)
    padded = pad(model, padding)
    assert padded.num_parameters() == padding.parameters
    assert abs(padding.parameters - 400_000) < 4 * 3 * 32 * 64 / 2 + 1
    assert padding.intermediate_size % 64 == 0
    assert plan(model.config, model.num_parameters(), 400_000).num_layers == 3


def test_sizes_that_cannot_be_reached_are_refused() -> None:
    model = tiny()
    with pytest.raises(ConfigError, match="fewer than the"):
        plan(model.config, model.num_parameters(), 1_000)
    with pytest.raises(ConfigError, match="at least as many"):
        plan(model.config, model.num_parameters(), 400_000, num_layers=1)


def test_the_folder_says_that_it_is_padded(tmp_path: Path) -> None:
    source = tmp_path / "small"
    folder.save(tiny(torch.float32), train_tokenizer(["def f():\n    return 1\n"], 320), source)
    padding = make_padded(source, tmp_path / "out", 300_000)
    with pytest.raises(ConfigError, match=r"out exists\..*--force"):
        make_padded(source, tmp_path / "out", 300_000)
    original, _ = folder.load(source)
    padded, _ = folder.load(tmp_path / "out")
    assert padded.num_parameters() == padding.parameters
    assert json.loads((tmp_path / "out" / "config.json").read_text())["forerun_cost_padded"] is True
    assert "cost-padded" in (tmp_path / "out" / "README.md").read_text()
    assert folder.read_record(tmp_path / "out")["effective_parameters"] == original.num_parameters()
    assert torch.equal(logits(original).argmax(-1), logits(padded).argmax(-1))


@pytest.mark.parametrize(("text", "count"), [("200M", 200_000_000), ("1.3b", 1_300_000_000), ("5000", 5_000)])
def test_parameter_counts(text: str, count: int) -> None:
    assert parse_parameters(text) == count


@pytest.mark.parametrize("text", ["", "M", "-5M", "0", "many", "infB", "nan"])
def test_senseless_parameter_counts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="200M"):
        parse_parameters(text)
