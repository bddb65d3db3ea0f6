"""GGUF files of every described family compute what the model computes that they were written of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from families import DESCRIBED, SCANNED
from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.kernels.cpu import native
from forerun.models import Rows, load_model, load_transformers_model
from forerun.models.families.table import ARCHITECTURES
from forerun.models.loading.source import find_source
from gguf_files import write_gguf
from gguf_models import TEXT, ours, theirs, tiny

# llama.cpp has no output layer beside the embedding for these
_TIED = {"tie_word_embeddings": True}
_WINDOW = {"sliding_window": 24}
_ELSEWHERE = {"llama", "qwen2", "qwen3"}  # tested in test_gguf.py
_OF_FILES = {name for each in ARCHITECTURES.values() for name in (each.model_type, each.windowed)} - _ELSEWHERE
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
_KINDS = {
    "full_attention": {**_YARN, "attention_factor": 1.3},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in DESCRIBED if family in _OF_FILES),
    ("gemma4_text", {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "enable_moe_block": False}),
    ("gemma4_text", {"enable_moe_block": False, "attention_k_eq_v": False, "use_double_wide_mlp": True}),
    ("deepseek_v3", {}),
    ("deepseek_v3", {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "norm_topk_prob": False}),
    ("deepseek_v2", {"topk_method": "greedy", "n_group": None, "topk_group": None, "q_lora_rank": 48}),
    ("deepseek_v2", {"rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 24.0}}),
    ("glm4_moe_lite", {}),
    ("bamba", {}),
    ("bamba", {"attention_bias": True, "mamba_conv_bias": False}),
    ("falcon_h1", {"mamba_rms_norm": True, "projectors_bias": True}),
    ("granitemoehybrid", {"mamba_proj_bias": True, "mamba_conv_bias": False}),
    ("lfm2", {**_TIED, "conv_bias": True}),
    ("mamba2", {**_TIED, "n_groups": 1}),
    ("nemotron_h", {"mlp_bias": True, "use_conv_bias": False}),
    ("cohere", {**_TIED, "attention_bias": True}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    ("gemma2", {**_TIED, "head_dim": 32, "query_pre_attn_scalar": 32}),
    ("glm4", {"attention_bias": True}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("granite", {"attention_bias": True, "mlp_bias": True, **_TIED}),
    ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    ("olmo3", {"rope_parameters": _KINDS}),
    ("phi3", _WINDOW),
    ("arcee", {"rope_parameters": _YARN}),
    ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    ("starcoder2", {"use_bias": False}),
]


def names(variant: tuple[str, dict[str, Any]]) -> str:
    return "-".join([variant[0], *variant[1]])


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 2e-5), ("float32", 1e-4)])
@pytest.mark.parametrize("variant", VARIANTS, ids=map(names, VARIANTS))
def test_logits_are_those_of_the_model(
    variant: tuple[str, dict[str, Any]], dtype: str, tolerance: float, tmp_path: Path
) -> None:
    path, model = tmp_path / "it.gguf", tiny(variant[0], **variant[1])
    write_gguf(path, model)
    tolerance = max(1e-4, 5 * tolerance) if variant[0] in SCANNED else tolerance
    expected = theirs(model.to(getattr(torch, dtype)))
    torch.testing.assert_close(ours(path, dtype), expected, atol=tolerance, rtol=tolerance)
    if dtype == "float64":  # Transformers' classes take the configuration and the tensors, too
        torch.testing.assert_close(theirs(load_transformers_model(path, dtype)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["phi", "glm", "glm4"])
def test_queries_keys_and_values_in_one_tensor(family: str, tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny(family, attention_bias=True)
    expected = theirs(model)
    write_gguf(path, model, fused="qkv")
    torch.testing.assert_close(ours(path), expected, atol=1e-4, rtol=1e-4)
    packed = load_model(path, "float32").packed_weights
    assert packed["model.layers.1.self_attn.k_proj.weight"].blocks.base is not None  # not copied


def test_what_the_fused_decoder_does_not_compute_is_computed_by_transformers_modules(tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny("olmo", clip_qkv=0.05)
    write_gguf(path, model, keys={"attention.clamp_kqv": 0.05})
    loaded = load_model(path, "float32")
    assert loaded.kind == "general"
    logits = loaded.forward([Rows(loaded.new_cache(), TEXT)]).logits
    torch.testing.assert_close(logits, theirs(model), atol=1e-4, rtol=1e-4)


def test_what_no_key_of_gemma_says(tmp_path: Path) -> None:
    path = tmp_path / "it.gguf"
    unsaid = {"rope.freq_base_swa": None, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    local = {"rope_type": "default", "rope_theta": 10000.0}
    model = tiny("gemma3_text", rope_parameters={"full_attention": linear, "sliding_attention": local})
    write_gguf(path, model, keys=unsaid)
    torch.testing.assert_close(ours(path), theirs(model), atol=1e-4, rtol=1e-4)

    write_gguf(path, model, keys={"attention.sliding_window_pattern": [False, True] * 3, **unsaid})
    assert [layer.attention.window for layer in load_model(path).decoder.spec.layers] == [None, 24] * 3
    write_gguf(path, model, keys={"attention.sliding_window": 0, **unsaid})
    assert [layer.attention.window for layer in load_model(path).decoder.spec.layers] == [None] * 6

    width = {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32}
    for layers, scale in ((6, 32), (62, 16)):
        write_gguf(path, model, keys={"block_count": layers, **width, **unsaid})
        assert find_source(path).plain_config().query_pre_attn_scalar == scale


def test_what_layers_of_gemma_4_may_have(tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny("gemma4_text")
    unread = np.ones((24, 64), np.float32)  # of a layer that reads the keys of another; published files have it
    beside = {"blk.2.attn_k.weight": unread, "blk.2.attn_k_norm.weight": unread[:, 0].copy()}
    write_gguf(path, model, tensors=beside)
    torch.testing.assert_close(ours(path), theirs(model), atol=1e-4, rtol=1e-4)
    for keys in (
        {"attention.value_length_swa": 32},
        {"attention.head_count_kv": [2, 1, 2]},
        {"feed_forward_length": [128, 64, 128]},
    ):
        write_gguf(path, model, keys=keys, tensors=beside)
        with pytest.raises(UnsupportedModelError, match=next(iter(keys))):
            load_model(path)


def test_factors_for_short_and_for_long_contexts(tmp_path: Path) -> None:
    path, short, long = tmp_path / "it.gguf", [1.0, 1.5, 2.0, 2.5], [1.0, 2.0, 4.0, 8.0]
    keys = {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.25}
    for factors, kind in ((long, "general"), (short, "fused")):
        rope = {"rope_type": "longrope", "rope_theta": 10000.0, "attention_factor": 1.25, "partial_rotary_factor": 0.5}
        rope |= {"short_factor": short, "long_factor": factors, "original_max_position_embeddings": 32}
        model = tiny("phi3", rope_parameters=rope, original_max_position_embeddings=32)
        tensors = {
            f"rope_factors_{name}.weight": np.array(each, np.float32)
            for name, each in (("short", short), ("long", factors))
        }
        write_gguf(path, model, keys=keys, tensors=tensors)
        served = load_model(path, "float32")
        logits = served.forward([Rows(served.new_cache(), TEXT)]).logits
        assert served.kind == kind
        torch.testing.assert_close(logits, theirs(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "phi3", "gpt_neox", "stablelm"])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_blocks_are_computed_as_stored(family: str, quantize: str | None, tmp_path: Path) -> None:
    if native() is None:
        pytest.skip("the native kernels are not available")
    path, model = tmp_path / "it.gguf", tiny(family)
    meaning = write_gguf(path, model, "Q8_0")
    model.load_state_dict(meaning, strict=False)
    served = load_model(path, quantize=quantize)
    assert (served.kind, served.quantize) == ("fused", quantize or "Q8_0")
    logits, expected = served.forward([Rows(served.new_cache(), TEXT)]).logits, theirs(model)
    assert (logits - expected).norm() < 0.05 * expected.norm()
    torch.testing.assert_close(ours(path, quantize="none"), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "keys", "said"),
    [
        ("cohere", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("starcoder2", {"logit_scale": 0.5}, "logit_scale is 0.5"),
        ("gemma2", {"rope.freq_base_swa": 500.0}, r"rope.freq_base_swa is 500.0 and rope.freq_base is 10000.0"),
        ("glm4", {"nextn_predict_layers": 1}, "nextn_predict_layers is 1"),
        ("glm4", {"rope.dimension_sections": [2, 1, 1, 0]}, "rope.dimension_sections is"),
        ("phi", {"rope.dimension_count": 7}, "rope.dimension_count is 7 and the heads are 16 wide"),
        ("nemotron", {"rope.dimension_count": 32}, "rope.dimension_count is 32"),
        ("cohere2", {"rope.dimension_count": 8}, "rope.dimension_count is 8"),
        ("granite", {"rope.scaling.finetuned": False}, "rope.scaling.finetuned is False"),
        ("granite", {"rope.scaling.attn_factor": 2.0}, "rope.scaling.attn_factor is 2.0"),
        ("seed_oss", {"attention.sliding_window": 8}, "sliding window of 8 positions"),
        ("olmo", {"attention.layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
    ],
)
def test_what_is_not_computed_is_refused(family: str, keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "it.gguf", tiny(family), keys=keys)
    with pytest.raises(UnsupportedModelError, match=f"it.gguf.*{said}"):
        load_model(tmp_path / "it.gguf")


@pytest.mark.parametrize(
    ("family", "keys", "said"),
    [
        ("gemma2", {"attention.sliding_window_pattern": [True]}, "sliding_window_pattern is .*a list of 2 flags"),
        ("gemma2", {"attention.sliding_window_pattern": [1, 1]}, "sliding_window_pattern is .*a list of 2 flags"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping is -1.0"),
        ("cohere2", {"attention.sliding_window": None}, "attention.sliding_window is missing"),
        ("olmo3", {"attention.sliding_window": 2**31}, "sliding_window is 2147483648"),
        ("granite", {"logit_scale": None}, "logit_scale is missing"),
        ("granite", {"logit_scale": 0.0}, "logits_scaling is 0.0"),
        ("gpt_neox", {"use_parallel_residual": 1}, "use_parallel_residual is 1"),
        ("stablelm", {"attention.layer_norm_epsilon": None}, "layer_norm_epsilon is missing"),
    ],
)
def test_metadata_that_cannot_be(family: str, keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "it.gguf", tiny(family), keys=keys)
    with pytest.raises(ModelLoadError, match=f"it.gguf.*{said}"):
        load_model(tmp_path / "it.gguf")


def test_factors_of_one_kind_alone(tmp_path: Path) -> None:
    write_gguf(tmp_path / "it.gguf", tiny("phi3"), tensors={"rope_factors_long.weight": np.ones(8, np.float32)})
    with pytest.raises(ModelLoadError, match=r"the tensor rope_factors_short\.weight is missing"):
        load_model(tmp_path / "it.gguf")
