"""Heads that are published as pickles: their tensors are written as safetensors, and nothing of them is run."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from forerun.cli.main import app
from forerun.drafters.models.head_files.folder import load_head
from forerun.errors import ConfigError, ModelLoadError
from forerun.export.quantized import export_head
from head_cases import EAGLE_1, random_tensors

SRC = Path(__file__).parents[3] / "src" / "forerun"
SETTINGS = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
}


def published(folder: Path, name: str = "pytorch_model.bin") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SETTINGS))
    torch.save({**random_tensors(EAGLE_1), "step": 7}, folder / name)
    return folder / name


def test_the_tensors_are_those_of_the_file(tmp_path: Path) -> None:
    file, out = published(tmp_path / "head"), tmp_path / "out"
    with pytest.raises(ModelLoadError, match=f"as model.safetensors: forerun export head {re.escape(str(file))} OUT"):
        load_head(file.parent, 12)
    result = CliRunner().invoke(app, ["export", "head", str(file), str(out)])
    assert result.exit_code == 0 and "float32" in result.output
    head = load_head(out, 12)
    assert head.config == EAGLE_1
    assert all(torch.equal(head.tensors[name], tensor) for name, tensor in random_tensors(EAGLE_1).items())
    with pytest.raises(ConfigError, match="out"):
        export_head(file, out)


@pytest.mark.slow
def test_medusas_file_keeps_its_name(tmp_path: Path) -> None:
    export_head(published(tmp_path / "head", "medusa_lm_head.pt"), tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "medusa_lm_head.safetensors"]


class Harm:
    """Would write a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.path), "w")


@pytest.mark.slow
@pytest.mark.parametrize("content", ["harm", "damage"])
def test_what_is_no_tensors_is_refused_and_not_run(content: str, tmp_path: Path) -> None:
    file = published(tmp_path / "head")
    file.write_bytes(pickle.dumps({"fc.weight": Harm(tmp_path / "harmed")}) if content == "harm" else b"PK\x03\x04")
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin: no tensors could be read from it: "):
        export_head(file, tmp_path / "out")
    assert not (tmp_path / "harmed").exists() and not (tmp_path / "out").exists()


def test_a_file_without_configuration(tmp_path: Path) -> None:
    file = published(tmp_path / "head")
    (file.parent / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"holds no config\.json"):
        export_head(file, tmp_path / "out")


def test_nothing_else_opens_a_pickle() -> None:
    opened = re.compile(r"torch\.load\(|\bimport pickle|allow_pickle=True|joblib")
    files = {path.relative_to(SRC).as_posix() for path in SRC.rglob("*.py") if opened.search(path.read_text("utf-8"))}
    assert files == {"train/checkpoint.py", "export/quantized.py"}  # the first one's are forerun's own
    for file in files:
        assert all(
            "weights_only=True" in line
            for line in (SRC / file).read_text("utf-8").splitlines()
            if "torch.load(" in line
        )
