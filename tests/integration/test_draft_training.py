"""The bundled pair goes through all of `forerun train draft`: cut, fitted and taught, a folder that is served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from forerun import LLM, DraftModel, SamplingParams
from forerun.cli.main import app
from forerun.config import ASSETS


def test_a_layer_of_the_bundled_draft_is_trained_for_the_bundled_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for index in range(300):
        lines = [f"def f{index}_{line}(value):\n    return value + {line}\n" for line in range(3)]
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{index}.py").write_text("\n".join(lines))
    (tmp_path / "keys.toml").write_text("[train.draft]\nwindow = 128\n")
    places = ["--target", "bundled", "--start", "bundled-draft", "--data", "text"]
    command = ["--config", "keys.toml", "train", "draft", "mine", *places, "--layers", "1", "--tokens", "8192"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "layers 0 of 2 are kept" in result.stdout or "layers 1 of 2 are kept" in result.stdout
    assert "acceptance rate" in result.stdout
    record = json.loads((tmp_path / "mine" / "training.json").read_text())
    assert {name: stage["steps"] for name, stage in record["stages"].items() if stage["steps"]} == {
        "fit": 1,
        "distillation": 4,
    }
    assert record["options"]["pruning"]["layers"] == "1" and record["acceptance"][0]["tokens"] > 20
    weights, of_start = (
        load_file(tmp_path / "mine" / "model.safetensors"),
        load_file(ASSETS / "draft" / "model.safetensors"),
    )
    embedding = weights["model.embed_tokens.weight"]
    assert embedding.equal(of_start["model.embed_tokens.weight"])  # bit for bit
    assert not any(name.startswith("model.layers.1.") for name in weights)
    params = SamplingParams(temperature=0, max_tokens=24)
    plain, drafted = (LLM("bundled", drafter, num_draft_tokens=3) for drafter in (None, DraftModel("mine")))
    answer = drafted.generate("def f(value):\n", params)
    assert answer.token_ids == plain.generate("def f(value):\n", params).token_ids and answer.stats.num_draft_tokens > 0
    again = CliRunner().invoke(app, [*command, "--resume"])
    assert again.exit_code == 0, again.output
    assert load_file(tmp_path / "mine" / "model.safetensors")["model.norm.weight"].equal(weights["model.norm.weight"])
