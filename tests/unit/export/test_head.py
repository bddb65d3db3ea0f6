"""Heads at 8 bits: the same head but for rounding, a quarter of the bytes, with record and card."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from forerun.cli.main import app
from forerun.drafters.models.head_files.folder import load_head, save_head
from forerun.errors import ConfigError
from forerun.export.quantized import export_head
from head_cases import EXTENDED, random_d2t, random_tensors


@pytest.fixture
def head(tmp_path: Path) -> Path:
    folder = tmp_path / "head"
    target = "96-32-0--"
    save_head(
        folder,
        EXTENDED,
        random_tensors(EXTENDED),
        random_d2t(EXTENDED),
        {"command": "train"},
        fingerprint=target,
        number_format="int4",
    )
    (folder / "README.md").write_text("# A card\n")
    (folder / "training.json").write_text("{}\n")
    return folder


def test_it_is_the_same_head_but_for_rounding(head: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", "head", str(head), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    before, after = load_head(head), load_head(tmp_path / "out")
    assert (after.config, after.record, after.fingerprint, after.number_format) == (
        before.config,
        before.record,
        before.fingerprint,
        before.number_format,
    )
    assert before.d2t is not None and after.d2t is not None and torch.equal(after.d2t, before.d2t)
    assert set(after.quantized) == {name for name, tensor in before.tensors.items() if tensor.dim() == 2}
    for name, tensor in before.tensors.items():
        step = tensor.abs().amax(-1, keepdim=True) / 127
        assert bool(((after.tensors[name] - tensor).abs() <= (0.51 * step if tensor.dim() == 2 else 0)).all())
    assert (tmp_path / "out" / "README.md").read_text().startswith("# A card\n\nThe matrices in this folder are kept")
    assert after.nbytes < before.nbytes / 2


def test_what_cannot_be_is_refused(head: Path, tmp_path: Path) -> None:
    exported = export_head(head, tmp_path / "out")
    assert exported.dtype == "int8" and exported.files == (
        "README.md",
        "config.json",
        "model.safetensors",
        "training.json",
    )
    with pytest.raises(ConfigError, match="at 8 bits already"):
        export_head(tmp_path / "out", tmp_path / "again")
    with pytest.raises(ConfigError, match="out"):
        export_head(head, tmp_path / "out")
    assert not (tmp_path / "again").exists()
    (tmp_path / "public").mkdir()
    (tmp_path / "public" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="public form"):
        export_head(tmp_path / "public", tmp_path / "again")
