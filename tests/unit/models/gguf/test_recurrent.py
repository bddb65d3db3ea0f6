"""GGUF files of families with recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from families import VOCAB, tiny_model
from forerun import LLM, SamplingParams, Suffix
from forerun.errors import ModelLoadError
from forerun.export.quantized import export_quantized
from forerun.kernels.cpu import native
from forerun.models import Rows, load_model, load_transformers_model
from gguf_files import write_gguf

TEXT = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(0)).tolist()
QWEN: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "linear_num_value_heads": 8,
}
"""Sizes whose value heads are reordered; 24 numbers of each, so that blocks of 32 hold two heads' columns."""


def tiny(family: str = "qwen3_5_text", **options: Any) -> PreTrainedModel:
    model = tiny_model(family, **options)
    model.set_attn_implementation("eager")
    return model


def ours(path: Path, dtype: str = "float32", **options: Any) -> torch.Tensor:
    model = load_model(path, dtype, **options)
    assert model.kind == "fused"
    return model.forward([Rows(model.new_cache(), TEXT)]).logits


@torch.inference_mode()
def theirs(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([TEXT])).logits[0]
    return logits


@pytest.mark.parametrize("heads", [2, 8])
def test_a_file_computes_what_its_folder_does(heads: int, tmp_path: Path) -> None:
    model = tiny(**{**QWEN, "linear_num_value_heads": heads})
    write_gguf(tmp_path / "it.gguf", model)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(ours(tmp_path / "it.gguf"), ours(tmp_path), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("heads", [2, 8])
def test_transformers_reads_the_same_numbers(heads: int, tmp_path: Path) -> None:
    model = tiny(**{**QWEN, "linear_num_value_heads": heads})
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
    path, model = tmp_path / "it.gguf", tiny(**QWEN)
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


@pytest.mark.parametrize("type_name", ["F32", "Q8_0", "Q4_0"])
def test_speculation_says_what_plain_decoding_says(type_name: str, tmp_path: Path) -> None:
    path = tmp_path / "it.gguf"
    write_gguf(path, tiny(**QWEN), type_name)
    prompts, params = [TEXT[:12] * 3, TEXT[12:30]], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    def answers(drafter: Any) -> list[Any]:
        results: Any = LLM(load_model(path), drafter, num_draft_tokens=4).generate(prompts, params)
        return [each.token_ids for each in results]

    assert answers(Suffix()) == answers(None)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny(**QWEN)
    write_gguf(path, model)
    expected = ours(path)
    further = {f"blk.4.{name}.weight": np.ones(64, np.float32) for name in ("nextn.enorm", "nextn.hnorm", "attn_norm")}
    further["blk.4.nextn.eh_proj.weight"] = np.ones((64, 128), np.float32)
    write_gguf(path, model, keys={"block_count": 5, "nextn_predict_layers": 1}, tensors=further)
    assert torch.equal(ours(path), expected)


def test_flags_by_layer(tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny(**{**QWEN, "layer_types": QWEN["layer_types"][::-1]})
    flags = [False, True, True, True]
    write_gguf(path, model, keys={"full_attention_interval": None, "attention.recurrent_layers": flags})
    torch.testing.assert_close(ours(path), theirs(model), atol=5e-4, rtol=5e-4)


def test_an_adapter_is_merged_in_transformers_order(tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny(**QWEN)
    write_gguf(path, model)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    wrapped.save_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(ours(path, adapter=tmp_path / "adapter"), theirs(wrapped), atol=2e-3, rtol=2e-3)


def test_a_quantized_folder_has_transformers_order(tmp_path: Path) -> None:
    path, model = tmp_path / "it.gguf", tiny(**QWEN)
    model.load_state_dict(write_gguf(path, model, "Q8_0"), strict=False)
    export_quantized(path, tmp_path / "out", "int8")
    logits, expected = ours(tmp_path / "out"), theirs(model)
    assert (logits - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"ssm.time_step_rank": 3}, "ssm.time_step_rank is 3, but must be a multiple of 2, which is ssm.group_count"),
        ({"ssm.inner_size": 100}, "ssm.inner_size is 100, but must be a multiple of 8"),
        ({"ssm.conv_kernel": 17}, "ssm.conv_kernel is 17, but must be 16 at most"),
        ({"ssm.state_size": None}, "ssm.state_size is missing"),
        ({"ssm.state_size": 8}, "has shape"),
        ({"nextn_predict_layers": 4}, "nextn_predict_layers is 4, but must be less than block_count"),
        ({"attention.recurrent_layers": [True, False]}, "must be a list of 4 flags"),
        ({"full_attention_interval": 2}, "blk|missing|linear_attn"),
    ],
)
def test_metadata_that_cannot_be(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "it.gguf", tiny(**QWEN), keys=keys)
    with pytest.raises(ModelLoadError, match=f"it.gguf.*{said}"):
        load_model(tmp_path / "it.gguf")
