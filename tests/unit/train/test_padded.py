from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from forerun.errors import ConfigError
from forerun.lab.bench.padded_model import parse_parameters
from forerun.train import card as folder
from tools import toys
from tools.lm import build_model, train_tokenizer

from .conftest import TINY


def tiny(dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    return build_model(TINY, end_token=0, seed=1).to(dtype).eval()


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(40).view(2, 20)).logits


def test_the_folder_says_that_it_is_padded(tmp_path: Path) -> None:
    source, out = tmp_path / "small", tmp_path / "out"
    folder.save_model(tiny(torch.float32), train_tokenizer(["def f():\n    return 1\n"], 320), source)
    arguments = ["padded", str(out), "300K", "--source", str(source)]
    done = CliRunner().invoke(toys.app, arguments)
    assert done.exit_code == 0 and "Cost-padded model: " in done.output
    again = CliRunner().invoke(toys.app, arguments)
    assert again.exit_code == 2 and "exists." in again.output and "--force" in again.output
    original, _ = folder.load_model_and_tokenizer(source)
    padded, _ = folder.load_model_and_tokenizer(out)
    assert abs(padded.num_parameters() - 300_000) < 60_000
    assert json.loads((out / "config.json").read_text())["forerun_cost_padded"] is True
    assert "cost-padded" in (out / "README.md").read_text()
    assert torch.allclose(logits(original), logits(padded), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("text", "count"), [("200M", 200_000_000), ("1.3b", 1_300_000_000), ("5000", 5_000)])
def test_parameter_counts(text: str, count: int) -> None:
    assert parse_parameters(text) == count


@pytest.mark.parametrize("text", ["", "M", "-5M", "0", "many", "infB", "nan"])
def test_senseless_parameter_counts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="200M"):
        parse_parameters(text)
