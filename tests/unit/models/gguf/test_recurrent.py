"""GGUF files of families with recurrent layers."""

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
from forerun.export.quantized import export_quantized
from forerun.kernels.cpu import native
from forerun.models import Rows, load_model, load_transformers_model
from gguf_files import write_gguf
from gguf_models import TEXT, answers, ours, theirs, tiny
from gguf_recurrent import SIZES

QWEN = "qwen3_5_text"


@pytest.mark.parametrize("heads", [2, 8])
def test_a_file_computes_what_its_folder_does(heads: int, tmp_path: Path) -> None:
    model = tiny(QWEN, linear_num_value_heads=heads)
    write_gguf(tmp_path / "it.gguf", model)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(ours(tmp_path / "it.gguf"), ours(tmp_path), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("heads", [2, 8])
def test_transformers_reads_the_same_numbers(heads: int, tmp_path: Path) -> None:
    model = tiny(QWEN, linear_num_value_heads=heads)
    tokens = [f"t{token}" for token in range(VOCAB)]
    write_gguf(tmp_path / "it.gguf", model, tokens=tokens)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="it.gguf", dtype=torch.float32).state_dict()
    loaded = load_transformers_model(tmp_path / "it.gguf", "float32").state_dict()
    assert read.keys() == loaded.keys() == model.state_dict().keys()
    for name, numbers in loaded.items():
        torch.testing.assert_close(numbers, read[name], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(numbers, model.state_dict()[name], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("type_name", ["F16", "Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("quantize", [None, "none", "int8"])
def test_heads_stay_in_the_order_of_the_file(type_name: str, quantize: str | None, tmp_path: Path) -> None:
    if native() is None:
        pytest.skip("the native kernels are not available")
    path, model = tmp_path / "it.gguf", tiny(QWEN)
    model.load_state_dict(write_gguf(path, model, type_name), strict=False)
    served, expected = load_model(path, "float32", quantize=quantize), theirs(model)
    assert served.decoder.spec.recurrence.heads_are_tiled
    assert served.quantize == ({None: None if type_name == "F16" else type_name, "none": None}.get(quantize, quantize))
    logits = served.forward([Rows(served.new_cache(), TEXT)]).logits
    if quantize == "none" or (type_name == "F16" and quantize is None):
        torch.testing.assert_close(logits, expected, atol=5e-4, rtol=5e-4)
    assert (logits - expected).norm() < 0.4 * expected.norm()  # with heads in the wrong order it is larger than 1
    out = "model.layers.0.linear_attn.out_proj.weight"
    assert served.packed_weights[out].content is not None  # as it lies in the file


@pytest.mark.parametrize("type_name", ["Q4_K", "Q6_K"])
def test_blocks_of_256_hold_several_heads(type_name: str, tmp_path: Path) -> None:
    path = tmp_path / "it.gguf"
    model = tiny(QWEN, hidden_size=256, intermediate_size=256, head_dim=64, linear_value_head_dim=32)
    model.load_state_dict(write_gguf(path, model, type_name), strict=False)
    expected, stored = theirs(model), ours(path)
    assert (stored - expected).norm() < 0.1 * expected.norm()
    torch.testing.assert_close(ours(path, quantize="none"), expected, atol=5e-4, rtol=5e-4)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("type_name", ["F32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("family", SIZES)
def test_speculation_says_what_plain_decoding_says(family: str, type_name: str, tmp_path: Path) -> None:
    path = tmp_path / "it.gguf"
    write_gguf(path, tiny(family), type_name)
    assert answers(path, Suffix()) == answers(path, None)


@pytest.mark.parametrize("type_name", ["F32", "Q8_0"])
def test_heads_stay_in_order_where_transformers_makes_the_modules(type_name: str, tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny(QWEN)
    further = {"blk.3.attn_output.bias": np.zeros(64, np.float32)}  # zero, and so left out
    model.load_state_dict(write_gguf(path, model, type_name, tensors=further), strict=False)
    torch.testing.assert_close(ours(path, quantize="none"), theirs(model), atol=5e-4, rtol=5e-4)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny(QWEN)
    write_gguf(path, model)
    expected = ours(path)
    further = {f"blk.4.{name}.weight": np.ones(64, np.float32) for name in ("nextn.enorm", "nextn.hnorm", "attn_norm")}
    further["blk.4.nextn.eh_proj.weight"] = np.ones((64, 128), np.float32)
    write_gguf(path, model, keys={"block_count": 5, "nextn_predict_layers": 1}, tensors=further)
    assert torch.equal(ours(path), expected)


def test_flags_by_layer(tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny(QWEN, layer_types=SIZES[QWEN]["layer_types"][::-1])
    flags = [False, True, True, True]
    write_gguf(path, model, keys={"full_attention_interval": None, "attention.recurrent_layers": flags})
    torch.testing.assert_close(ours(path), theirs(model), atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize("family", ["granitemoehybrid", "nemotron_h", "qwen3_5_text"])
def test_an_adapter_is_merged_in_transformers_order(family: str, tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny(family)
    write_gguf(path, model)
    modules = "all-linear" if family == "qwen3_5_text" else ["q_proj", "k_proj", "in_proj"]
    modules = [*modules, "input_linear"] if family == "granitemoehybrid" else modules
    config = peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    wrapped.save_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(ours(path, adapter=tmp_path / "adapter"), theirs(wrapped), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("family", ["granitemoehybrid", "qwen3_5_text"])
def test_a_quantized_folder_has_transformers_order(family: str, tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny(family)
    model.load_state_dict(write_gguf(path, model, "Q8_0"), strict=False)
    export_quantized(path, tmp_path / "out", "int8")
    logits, expected = ours(tmp_path / "out"), theirs(model)
    assert (logits - expected).norm() < 0.1 * expected.norm()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("type_name", ["F16", "Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("family", [family for family in SIZES if family != QWEN])
def test_blocks_are_computed_as_stored(family: str, type_name: str, tmp_path: Path) -> None:
    if native() is None:
        pytest.skip("the native kernels are not available")
    path, model = tmp_path / "it.gguf", tiny(family)
    model.load_state_dict(write_gguf(path, model, type_name), strict=False)
    served, expected = load_model(path, "float32"), theirs(model)
    assert served.quantize == (None if type_name == "F16" else type_name)
    logits = served.forward([Rows(served.new_cache(), TEXT)]).logits
    assert (logits - expected).norm() < 0.2 * expected.norm()
    torch.testing.assert_close(ours(path, quantize="none"), expected, atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize("types", [("Q8_0", "Q8_0"), ("Q8_0", "Q4_0")])
def test_gate_and_up_are_one_parameter(types: tuple[str, str], tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny("granitemoehybrid")
    model.load_state_dict(
        write_gguf(path, model, lambda name: types[1] if "up_proj" in name else types[0]), strict=False
    )
    served, expected = load_model(path, "float32"), theirs(model)
    assert served.packed_weights["model.layers.0.shared_mlp.input_linear.weight"].type_name == (
        "Q8_0" if types[0] == types[1] else "F32"
    )
    logits = served.forward([Rows(served.new_cache(), TEXT)]).logits
    assert (logits - expected).norm() < 0.2 * expected.norm()
    torch.testing.assert_close(ours(path, quantize="none"), expected, atol=5e-4, rtol=5e-4)


def test_granite_may_be_rotated(tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny("granitemoehybrid", position_embedding_type="rope")
    write_gguf(path, model, keys={"rope.scaling.finetuned": True})
    torch.testing.assert_close(ours(path), theirs(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "keys", "said"),
    [
        (
            "qwen3_5_text",
            {"ssm.time_step_rank": 3},
            "ssm.time_step_rank is 3, but must be a multiple of 2, which is ssm.group_count",
        ),
        ("qwen3_5_text", {"ssm.inner_size": 100}, "ssm.inner_size is 100, but must be a multiple of 8"),
        ("qwen3_5_text", {"ssm.conv_kernel": 17}, "ssm.conv_kernel is 17, but must be 16 at most"),
        ("qwen3_5_text", {"ssm.state_size": None}, "ssm.state_size is missing"),
        ("qwen3_5_text", {"ssm.state_size": 8}, "has shape"),
        ("qwen3_5_text", {"nextn_predict_layers": 4}, "nextn_predict_layers is 4, but must be less than block_count"),
        ("qwen3_5_text", {"attention.recurrent_layers": [True, False]}, "must be a list of 4 flags"),
        ("granitemoehybrid", {"attention.head_count_kv": [0, 2, 2]}, "must be a list of 2 counts"),
        ("granitemoehybrid", {"attention.head_count_kv": [0, -2]}, "must be a list of counts"),
        ("granitemoehybrid", {"logit_scale": None}, "logit_scale is missing"),
        ("nemotron_h", {"feed_forward_length": 8}, "feed_forward_length"),
        ("mamba2", {"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ("mamba2", {"ssm.inner_size": 64}, "has shape"),
        ("qwen3_5_text", {"full_attention_interval": 2}, "blk|missing|linear_attn"),
    ],
)
def test_metadata_that_cannot_be(family: str, keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "it.gguf", tiny(family), keys=keys)
    with pytest.raises(ModelLoadError, match=f"it.gguf.*{said}"):
        load_model(tmp_path / "it.gguf")


@pytest.mark.parametrize(
    ("family", "keys", "said"),
    [
        ("falcon_h1", {"expert_count": 8}, "expert_count is 8"),
        ("nemotron_h", {"nextn_predict_layers": 1}, "nextn_predict_layers is 1"),
        ("granitemoehybrid", {"attention.head_count_kv": [4, 2]}, "head_count_kv differs from layer to layer"),
        ("nemotron_h", {"attention.head_count_kv": [0, 2, 2, 0]}, "a layer has attention.head_count_kv and feed"),
        (
            "granitemoehybrid",
            {"rope.scaling.finetuned": True, "rope.dimension_count": 8},
            "rope.dimension_count is 8 and the heads are 16 wide",
        ),
    ],
)
def test_what_is_not_computed_is_refused(family: str, keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "it.gguf", tiny(family), keys=keys)
    with pytest.raises(UnsupportedModelError, match=f"it.gguf.*{said}"):
        load_model(tmp_path / "it.gguf")


def test_a_tied_falcon_h1_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "it.gguf", tiny("falcon_h1", tie_word_embeddings=True))
    with pytest.raises(UnsupportedModelError, match=r"there is no tensor output\.weight"):
        load_model(tmp_path / "it.gguf")
