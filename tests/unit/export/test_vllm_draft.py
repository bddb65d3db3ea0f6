"""Draft models for vLLM: a Transformers folder with its configuration, and the drafts that vLLM could not use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as tf

from changed_folder import changed
from forerun.config import ASSETS, BUNDLED_MODELS
from forerun.drafters.models.head_files.folder import is_head
from forerun.errors import ConfigError, IncompatibleDrafterError
from forerun.export.vllm import export_vllm_draft
from forerun.models import load_tokenizer, load_transformers_model

IDS = torch.tensor([[3, 14, 15, 92, 65]])


def test_the_bundled_draft(tmp_path: Path) -> None:
    out = tmp_path / "out"
    exported = export_vllm_draft("bundled-draft", out, "bundled", num_draft_tokens=4)
    assert exported.speculative == {"method": "draft_model", "model": str(out), "num_speculative_tokens": 4}
    assert json.loads((out / "speculative_config.json").read_text()) == exported.speculative
    assert "--speculative-config" in (out / "README.md").read_text()
    read = tf.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert torch.equal(read(IDS).logits, load_transformers_model("bundled-draft", "float32")(IDS).logits)
    with pytest.raises(ConfigError, match="exists"):
        export_vllm_draft("bundled-draft", out, "bundled")
    export_vllm_draft("bundled-draft", out, "bundled", force=True)


def test_a_parallel_draft_is_told_to_be_one(tmp_path: Path) -> None:
    parallel = changed(BUNDLED_MODELS["bundled-draft"], tmp_path / "parallel", pard_token=4095)
    exported = export_vllm_draft(parallel, tmp_path / "out", "bundled")
    assert exported.speculative["parallel_drafting"] is True
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pard_token"] == 4095


def test_drafts_that_vllm_cannot_use(tmp_path: Path) -> None:
    reduced = changed(BUNDLED_MODELS["bundled-draft"], tmp_path / "reduced", output_token_ids=[0, 1, 2])
    with pytest.raises(IncompatibleDrafterError, match=r"proposes 3 of 4,096 tokens .*method draft_model computes all"):
        export_vllm_draft(reduced, tmp_path / "out", "bundled")
    with pytest.raises(IncompatibleDrafterError, match="cannot draft for bundled"):
        export_vllm_draft("bundled-other-vocab", tmp_path / "out", "bundled")
    torch.manual_seed(0)
    wide = tf.LlamaConfig(
        vocab_size=4100, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    tf.LlamaForCausalLM(wide).save_pretrained(tmp_path / "wide")
    load_tokenizer("bundled").save_pretrained(tmp_path / "wide")
    with pytest.raises(IncompatibleDrafterError, match=r"4100 tokens and bundled of 4096.*the same number"):
        export_vllm_draft(tmp_path / "wide", tmp_path / "out", "bundled")
    assert not (tmp_path / "out").exists()


def test_heads_and_models_are_told_apart(tmp_path: Path) -> None:
    heads = [path.parent for path in (ASSETS / "heads").rglob("config.json")]
    assert heads and all(is_head(folder) for folder in heads)
    assert not any(is_head(folder) for folder in BUNDLED_MODELS.values())
    assert not is_head(tmp_path)
