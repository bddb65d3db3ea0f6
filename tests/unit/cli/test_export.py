"""`forerun export hf`: what it says and refuses."""

from __future__ import annotations

from pathlib import Path

from families import make_family

from .conftest import Invoke


def test_export_hf(invoke: Invoke, tmp_path: Path) -> None:
    source, out = make_family("llama", tmp_path), tmp_path / "out"
    result = invoke("export", "hf", str(source), str(out), "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{out}: ") and "parameters in bfloat16" in result.stdout
    assert (out / "model.safetensors").exists()
    again = invoke("export", "hf", str(source), str(out))
    assert again.exit_code == 2 and "exists" in again.stderr and "--force" in again.stderr
    assert invoke("export", "hf", str(source), str(out), "--force").exit_code == 0
    missing = invoke("export", "hf", str(tmp_path / "none"), str(tmp_path / "other"))
    assert missing.exit_code == 2 and "does not exist" in missing.stderr


def test_quantize(invoke: Invoke, tmp_path: Path) -> None:
    source, out = make_family("llama", tmp_path), tmp_path / "out"
    result = invoke("quantize", str(source), str(out), "--quantize", "int4")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{out}: ") and "parameters in int4" in result.stdout
    assert "Not measured: the model has no tokenizer." in (out / "README.md").read_text()
    again = invoke("quantize", str(source), str(out))
    assert again.exit_code == 2 and "exists" in again.stderr and "--force" in again.stderr
    assert invoke("quantize", str(source), str(out), "--force", "--no-measure").exit_code == 0
    wrong = invoke("quantize", str(source), str(tmp_path / "other"), "--quantize", "int3")
    assert wrong.exit_code == 2 and "'int3', but must be one of int8, int4" in wrong.stderr
    assert invoke("generate", "x", "--model", str(out), "--quantize", "int5").exit_code == 2
