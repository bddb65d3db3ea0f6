"""GGUF files of attention with latents, beyond what is tested of all families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.models import load_model
from forerun.models.loading.source import find_source
from gguf_files import write_gguf
from gguf_models import ours, theirs, tiny

KEY, VALUE, HEADS = "attention.key_length", "attention.value_length", "attention.head_count_kv"
OLD: dict[str, Any] = {HEADS: 4, KEY: 40, VALUE: 96, f"{KEY}_mla": None, f"{VALUE}_mla": None}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 0.1}


@pytest.mark.parametrize("type_name", ["F32", "Q8_0"])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_older_files_have_one_tensor_for_keys_and_values(family: str, type_name: str, tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny(family)
    model.load_state_dict(write_gguf(path, model, type_name, keys=OLD, fused="latents"), strict=False)
    torch.testing.assert_close(ours(path, quantize="none"), theirs(model), atol=5e-4, rtol=5e-4)


def test_a_width_that_is_not_said(tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny("minicpm3", v_head_dim=24)
    write_gguf(path, model, keys={VALUE: 24})
    torch.testing.assert_close(ours(path), theirs(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "model_type"), [("deepseek_v2", "deepseek_v2"), ("glm4_moe_lite", "deepseek_v3")])
def test_scores_of_files_that_do_not_say_which(family: str, model_type: str, tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny(family)
    write_gguf(path, model, keys={"expert_gating_func": None})
    assert find_source(path).plain_config().model_type == model_type
    torch.testing.assert_close(ours(path), theirs(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "keys", "said"),
    [
        ("deepseek_v2", {"expert_weights_norm": True}, "expert_weights_norm is True"),
        ("deepseek_v3", {"expert_gating_func": 3}, "expert_gating_func is 3"),
        ("deepseek_v3", {"attention.temperature_scale": 0.1}, "temperature_scale is 0.1"),
        ("deepseek_v3", {"rope.dimension_count": 7}, "dimension_count is 7"),
        ("deepseek_v3", {"rope.scaling.factor": 4.0}, "rope.scaling.factor is 4.0"),
        ("deepseek_v3", {**YARN, "rope.scaling.attn_factor": 2.0}, "attn_factor is 2.0"),
        ("deepseek_v3", {HEADS: 4}, "head_count_kv is 4, and 1 with latents of 64"),
        ("deepseek_v3", {KEY: 40}, "key_length is 40, and 72 with latents of 64"),
        ("deepseek_v3", {VALUE: 32}, "value_length is 32, and 64 with latents of 64"),
        ("minicpm3", {HEADS: 2}, "head_count_kv is 2, and 4 with latents of 64"),
        ("minicpm3", {"logit_scale": 0.25}, "logit_scale is 0.25"),
    ],
)
def test_what_is_not_computed_is_refused(family: str, keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "it.gguf", tiny(family), keys=keys)
    with pytest.raises(UnsupportedModelError, match=f"it.gguf.*{said}"):
        load_model(tmp_path / "it.gguf")


@pytest.mark.parametrize(
    ("family", "keys", "said"),
    [
        ("deepseek_v3", {f"{VALUE}_mla": None}, "value_length_mla is missing"),
        ("deepseek_v3", {f"{KEY}_mla": 8}, "key_length_mla is 8"),
        ("deepseek_v3", {f"{KEY}_mla": 48}, r"q_b_proj.weight has shape \[160, 32\] .*and \[192, 32\]"),
        ("deepseek_v3", {f"{VALUE}_mla": 64}, r"(kv_b|o)_proj.weight has shape"),
        ("deepseek_v3", {**YARN, "rope.scaling.yarn_log_multiplier": None}, "yarn_log_multiplier is missing"),
        ("deepseek_v2", {"rope.dimension_count": None}, "dimension_count is missing"),
        ("minicpm3", {"attention.kv_lora_rank": None}, "kv_lora_rank is missing"),
    ],
)
def test_metadata_that_cannot_be(family: str, keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "it.gguf", tiny(family), keys=keys)
    with pytest.raises(ModelLoadError, match=f"it.gguf.*{said}"):
        load_model(tmp_path / "it.gguf")


def test_keys_and_values_that_are_there_twice(tmp_path: Path) -> None:
    whole = {"blk.1.attn_kv_b.weight": np.ones((512, 64), np.float32)}
    write_gguf(tmp_path / "it.gguf", tiny("deepseek_v3"), tensors=whole)
    with pytest.raises(ModelLoadError, match=r"'blk\.1\.attn_kv_b\.weight' is a second .*kv_b_proj\.weight"):
        load_model(tmp_path / "it.gguf")
