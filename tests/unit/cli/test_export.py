"""`forerun export`: what it says and refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from families import make_family
from forerun.drafters.models.head_files.folder import save_head
from head_cases import EAGLE_1, random_tensors

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


def test_export_vllm(invoke: Invoke, tmp_path: Path) -> None:
    target, head, out = make_family("llama", tmp_path), tmp_path / "head", tmp_path / "out"
    config = replace(EAGLE_1, hidden_size=64, target_hidden_size=64, layers=(2,))
    save_head(head, config, random_tensors(config))
    result = invoke("export", "vllm", str(head), str(out), "--target", str(target), "-k", "4")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"method": "eagle", "model": str(out), "num_speculative_tokens": 4}
    assert "parameters in float32" in result.stderr
    again = invoke("export", "vllm", str(head), str(out), "--target", str(target))
    assert again.exit_code == 2 and "exists" in again.stderr and "--force" in again.stderr
    none = invoke("export", "vllm", str(target), str(tmp_path / "other"), "--target", "no-such-model")
    assert none.exit_code == 2 and "no-such-model" in none.stderr


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


def test_export_vllm_of_a_draft_model(invoke: Invoke, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = invoke("export", "vllm", "bundled-draft", str(out), "--target", "bundled", "-k", "5")
    assert result.exit_code == 0, result.output
    said = {"method": "draft_model", "model": str(out), "num_speculative_tokens": 5}
    assert json.loads(result.stdout) == said
    form = invoke("export", "vllm", "bundled-draft", str(out), "--target", "bundled", "--form", "eagle")
    assert form.exit_code == 2 and "is no head" in form.stderr


def test_export_llama_cpp(invoke: Invoke, tmp_path: Path) -> None:
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    refused = invoke("export", "llama.cpp", "bundled-draft", str(target))
    assert refused.exit_code == 2 and "the key pre" in refused.stderr
    result = invoke("export", "llama.cpp", "bundled-draft", str(target), "--pre", "gpt-2")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"llama-server -m {target}\n" and "parameters in F16" in result.stderr
    options = ("--target", str(target), "--tensor-type", "Q8_0", "-k", "4")
    result = invoke("export", "llama.cpp", "bundled-draft", str(draft), *options)
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith(f"-md {draft} --spec-type draft-simple --spec-draft-n-max 4\n")
