"""GGUF files of mixtures of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from families import VOCAB
from forerun import Suffix
from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.kernels.cpu import native
from forerun.models import Rows, load_model, load_transformers_model
from forerun.models.loading.weights import progress_to
from gguf_experts import SIZES
from gguf_files import write_gguf
from gguf_latents import SIZES as LATENT
from gguf_models import TEXT, answers, ours, theirs, tiny

HYBRID = {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("type_name", ["F16", "Q8_0", "Q4_0", "MXFP4"])
@pytest.mark.parametrize("family", [*SIZES, *LATENT])
def test_blocks_are_computed_as_stored(family: str, type_name: str, tmp_path: Path) -> None:
    if native() is None:
        pytest.skip("the native kernels are not available")
    path, model = tmp_path / "it.gguf", tiny(family)
    model.load_state_dict(write_gguf(path, model, type_name), strict=False)
    served, expected = load_model(path, "float32"), theirs(model)
    assert served.quantize == (None if type_name == "F16" else type_name)
    logits = served.forward([Rows(served.new_cache(), TEXT)]).logits
    # activations are rounded to 8 bits, and a row near the boundary goes to another expert
    assert (logits - expected).norm() < 0.3 * expected.norm()
    torch.testing.assert_close(ours(path, quantize="none"), expected, atol=5e-4, rtol=5e-4)


def test_experts_lie_in_the_file(tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny("gpt_oss")
    write_gguf(path, model, lambda name: "MXFP4" if "exp" in name else "Q8_0")
    served = load_model(path, "float32")
    for part in ("gate_proj.weight", "up_proj.weight", "down_proj.weight", "down_proj.bias"):
        tensors = [served.packed_weights[f"model.layers.1.mlp.experts.{expert}.{part}"] for expert in range(4)]
        starts = [tensor.blocks.__array_interface__["data"][0] for tensor in tensors]
        assert {*np.diff(starts)} == {tensors[0].blocks.nbytes}
        assert tensors[0].content is not None
        assert tensors[0].type_name == ("F32" if part.endswith("bias") else "MXFP4")


@pytest.mark.parametrize("type_name", ["Q4_K", "Q6_K"])
def test_blocks_of_256(type_name: str, tmp_path: Path) -> None:
    path = tmp_path / "it.gguf"
    model = tiny("qwen3_moe", hidden_size=256, intermediate_size=256, moe_intermediate_size=256, head_dim=64)
    model.load_state_dict(write_gguf(path, model, type_name), strict=False)
    expected, stored = theirs(model), ours(path)
    assert (stored - expected).norm() < 0.1 * expected.norm()
    torch.testing.assert_close(ours(path, quantize="none"), expected, atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "qwen3_5_moe_text"])
def test_transformers_reads_the_same_numbers(family: str, tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny(family)
    write_gguf(path, model, tokens=[f"t{token}" for token in range(VOCAB)])
    # the configuration is given: it would not read the width of experts
    options = {"gguf_file": "it.gguf", "config": model.config, "dtype": torch.float32}
    read = AutoModelForCausalLM.from_pretrained(tmp_path, **options).state_dict()
    loaded = load_transformers_model(path, "float32").state_dict()
    assert read.keys() == loaded.keys() == model.state_dict().keys()
    for name, numbers in loaded.items():
        torch.testing.assert_close(numbers, read[name], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(numbers, model.state_dict()[name], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("type_name", ["F32", "Q8_0"])
@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_next"])
def test_gates_and_what_they_are_of_in_one_tensor(family: str, type_name: str, tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny(family)
    model.load_state_dict(write_gguf(path, model, type_name, fused="experts"), strict=False)
    torch.testing.assert_close(ours(path, quantize="none"), theirs(model), atol=5e-4, rtol=5e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("type_name", ["F32", "Q8_0", "MXFP4"])
@pytest.mark.parametrize("family", [*SIZES, *LATENT])
def test_speculation_says_what_plain_decoding_says(family: str, type_name: str, tmp_path: Path) -> None:
    path = tmp_path / "it.gguf"
    write_gguf(path, tiny(family), type_name)
    assert answers(path, Suffix()) == answers(path, None)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize(("family", "type_name"), [("qwen3_moe", "Q8_0"), ("gpt_oss", "MXFP4")])
def test_other_bits_than_those_of_the_file(family: str, type_name: str, quantize: str, tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny(family)
    model.load_state_dict(write_gguf(path, model, type_name), strict=False)
    logits, expected = ours(path, quantize=quantize), theirs(model)
    assert (logits - expected).norm() < {"int8": 0.3, "int4": 0.6}[quantize] * expected.norm()


@pytest.mark.parametrize("family", ["granitemoeshared", "mixtral"])
def test_an_adapter_is_merged(family: str, tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny(family)
    write_gguf(path, model)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    wrapped.save_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(ours(path, adapter=tmp_path / "adapter"), theirs(wrapped), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mixtral", {"sliding_window": 24}),
        ("granitemoehybrid", HYBRID),
        ("glm4_moe", {"use_qk_norm": False, "attention_bias": False, "norm_topk_prob": False}),
        (
            "ernie4_5_moe",
            {"moe_num_shared_experts": 0, "use_bias": False, "num_hidden_layers": 3, "moe_layer_interval": 2},
        ),
        ("lfm2_moe", {"use_expert_bias": False}),
    ],
)
def test_options(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny(family, **options)
    shared = {"expert_shared_feed_forward_length": None} if options.get("moe_num_shared_experts") == 0 else {}
    write_gguf(path, model, keys=shared)
    torch.testing.assert_close(ours(path), theirs(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "pattern"), [("glm4_moe", None), ("glm4_moe_lite", None), ("exaone_moe", [True, False, False])]
)
def test_layers_that_predict_further_tokens_are_left_out(family: str, pattern: Any, tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny(family)
    expected = theirs(model)
    further = {f"blk.2.{name}.weight": np.ones(64, np.float32) for name in ("nextn.enorm", "nextn.hnorm", "attn_norm")}
    further["blk.2.ffn_gate_exps.weight"] = np.ones((2, 64, 64), np.float32)
    keys = {"block_count": 3, "nextn_predict_layers": 1}
    write_gguf(
        path, model, keys=keys | ({"attention.sliding_window_pattern": pattern} if pattern else {}), tensors=further
    )
    torch.testing.assert_close(ours(path), expected, atol=1e-4, rtol=1e-4)


def test_a_width_that_is_not_said(tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny("qwen2_moe", shared_expert_intermediate_size=128)
    write_gguf(path, model, keys={"expert_feed_forward_length": None, "expert_shared_feed_forward_length": None})
    torch.testing.assert_close(ours(path), theirs(model), atol=1e-4, rtol=1e-4)


def test_all_that_is_read_is_counted(tmp_path: Path) -> None:
    path, seen = tmp_path / "it.gguf", list[tuple[int, int]]()
    for type_name in ("F32", "Q8_0"):
        write_gguf(path, tiny("qwen3_moe"), type_name)
        with progress_to(lambda name, read, total: seen.append((read, total))):
            load_model(path)
        assert seen[-1][0] == seen[-1][1]
        assert [read for read, _ in seen] == sorted(read for read, _ in seen)
        seen.clear()


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("family", "keys", "said"),
    [
        ("qwen3_moe", {"expert_weights_norm": False}, "expert_weights_norm is False"),
        ("olmoe", {"expert_weights_norm": True}, "expert_weights_norm is True"),
        ("qwen2_moe", {"expert_gating_func": 2}, "expert_gating_func is 2"),
        ("qwen2_moe", {"expert_gating_func": 3}, "expert_gating_func is 3"),
        ("gpt_oss", {"expert_gating_func": 1}, "expert_gating_func is 1"),
        ("glm4_moe", {"expert_gating_func": 4}, "expert_gating_func is 4"),
        ("mixtral", {"expert_weights_scale": 2.5}, "expert_weights_scale is 2.5"),
        ("lfm2_moe", {"expert_weights_scale": 2.5}, "expert_weights_scale is 2.5"),
        ("minimax_m2", {"expert_group_count": 2}, "expert_group_count is 2"),
        ("qwen3_moe", {"expert_shared_count": 1}, "expert_shared_count is 1"),
        ("qwen3_moe", {"leading_dense_block_count": 1}, "leading_dense_block_count is 1"),
        ("mixtral", {"interleave_moe_layer_step": 2}, "interleave_moe_layer_step is 2"),
        ("hunyuan_v1_moe", {"expert_shared_count": 2}, "expert_shared_count is 2"),
        ("hunyuan_v1_moe", {"expert_shared_feed_forward_length": 64}, "expert_shared_feed_forward_length is 64"),
        ("ernie4_5_moe", {"expert_shared_feed_forward_length": 96}, "expert_shared_feed_forward_length is 96"),
        ("granitemoe", {"rope.scaling.finetuned": False}, "rope.scaling.finetuned is False"),
        ("qwen3_moe", {"nextn_predict_layers": 1}, "nextn_predict_layers is 1"),
        ("qwen3_moe", {"expert_used_count": [2, 1]}, "expert_used_count differs from layer to layer"),
        ("qwen3", {"expert_count": 4}, "expert_count is 4"),
    ],
)
def test_what_is_not_computed_is_refused(family: str, keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "it.gguf", tiny(family), keys=keys)
    with pytest.raises(UnsupportedModelError, match=f"it.gguf.*{said}"):
        load_model(tmp_path / "it.gguf")


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("family", "keys", "said"),
    [
        ("mixtral", {"expert_used_count": 5}, "expert_used_count is 5, but must be 4 at most, which is expert_count"),
        ("qwen3_moe", {"expert_used_count": 0}, "expert_used_count is 0"),
        ("qwen3_moe", {"expert_used_count": None}, "expert_used_count is missing"),
        ("qwen3_moe", {"expert_count": None}, "expert_count is missing"),
        ("qwen3_moe", {"expert_count": 2**31}, "expert_count is 2147483648"),
        ("gpt_oss", {"expert_feed_forward_length": None}, "expert_feed_forward_length is missing"),
        ("qwen3_moe", {"expert_count": 3}, r"ffn_.*_exps.weight' has the shape \[4, .*and \[3, .* expert_count is 3"),
        ("gpt_oss", {"expert_count": 5}, r"ffn_.*_exps.* has the shape \[4, .*and \[5, .* expert_count is 5"),
        ("qwen3_moe", {"expert_feed_forward_length": 32}, r"has the shape \[4, 64, 64\], and \[4, 32, 64\]"),
        ("glm4_moe", {"expert_group_count": 3}, "expert_group_count is 3, but must be a divisor of 8"),
        ("glm4_moe", {"expert_group_used_count": 5}, "expert_group_used_count is 5, but must be 4 at most"),
        ("glm4_moe", {"expert_group_used_count": 1}, "expert_used_count is 3, but must be 2 at most"),
        ("glm4_moe", {"leading_dense_block_count": 0}, "lacks .* weights, among them model.layers.0.mlp.experts"),
        ("dots1", {"leading_dense_block_count": 2}, "blk.1.ffn_gate_exps"),
        ("qwen3_moe", {"block_count": 3}, "speaks of 3 layers, and the weights have 2"),
        ("exaone_moe", {"attention.sliding_window": None}, "sliding_window is missing"),
    ],
)
def test_metadata_that_cannot_be(family: str, keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "it.gguf", tiny(family), keys=keys)
    with pytest.raises(ModelLoadError, match=f"it.gguf.*{said}"):
        load_model(tmp_path / "it.gguf")
