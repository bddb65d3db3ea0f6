"""Models from GGUF files compute what the Transformers model of their tensors computes."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from transformers import PreTrainedModel

from forerun import LLM, SamplingParams
from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.models import Rows, load_draft_model, load_model, load_transformers_model
from forerun.models.fused.decoder import FusedDecoder
from forerun.models.loading.gguf.file import read_types
from gguf_files import TINY, write_gguf

VOCAB = 48
_SIZES: dict[str, Any] = {**TINY, "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64}
_MINISTRAL: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 4,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
_VISION: dict[str, Any] = {"depth": 1, "hidden_size": 16, "embed_dim": 16, "num_heads": 2, "intermediate_size": 16}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_SIZES)),
    "llama-tied": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_SIZES, tie_word_embeddings=True)),
    "llama-with-biases": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True)),
    "llama-with-wide-heads": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_SIZES, head_dim=16)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**_SIZES, sliding_window=None)),
    "mistral-with-window": lambda: tf.MistralForCausalLM(tf.MistralConfig(**_SIZES, sliding_window=4)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_SIZES)),
    "qwen2-tied": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_SIZES, head_dim=16)),
    "ministral3": lambda: tf.Ministral3ForCausalLM(tf.Ministral3Config(**_SIZES, rope_parameters=_MINISTRAL)),
    "mistral3": lambda: tf.Ministral3ForCausalLM(
        tf.Ministral3Config(**_SIZES, rope_parameters=_MINISTRAL | {"llama_4_scaling_beta": 0.0})
    ),
    "qwen2vl": lambda: _with_pictures("Qwen2VL", {"mrope_section": [1, 2, 1]}),
    "qwen3vl": lambda: _with_pictures("Qwen3VL", {"mrope_section": [4, 2, 2], "mrope_interleaved": True}, head_dim=16),
}


def _with_pictures(name: str, rope: dict[str, Any], **options: Any) -> PreTrainedModel:
    """Build a model of texts and pictures, whose rotation turns sections of a head by different positions."""
    text = _SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, **rope}} | options
    config = getattr(tf, f"{name}Config")(text_config=text, vision_config=_VISION, tie_word_embeddings=False)
    model: PreTrainedModel = getattr(tf, f"{name}ForConditionalGeneration")(config)
    return model


def drawn(model: PreTrainedModel) -> PreTrainedModel:
    """Draw weights wide enough that every one of them matters, norms and biases too."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(centre + torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


def llama(**options: Any) -> PreTrainedModel:
    return drawn(tf.LlamaForCausalLM(tf.LlamaConfig(**{**_SIZES, **options})))


@torch.inference_mode()
def logits_of(model: Any) -> torch.Tensor:
    """Return the logits of Transformers' module."""
    logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


def our_logits(path: Path, dtype: str = "float32", kind: Any = "auto") -> torch.Tensor:
    model = load_model(path, dtype, kind)
    return model.forward([Rows(model.new_cache(), PROMPT)]).logits


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_model_that_the_tensors_came_from(name: str, tmp_path: Path) -> None:
    model = drawn(MODELS[name]())
    write_gguf(tmp_path / "it.gguf", model)
    for dtype in (torch.float32, torch.float64):
        read = load_transformers_model(tmp_path / "it.gguf", str(dtype).removeprefix("torch."))
        assert torch.equal(logits_of(read), logits_of(model.to(dtype)))


@pytest.mark.parametrize(("name", "kind", "dtype"), [("llama", "fused", "float64"), ("qwen3", "general", "float32")])
def test_our_decoders_compute_the_same_from_both_kinds_of_files(
    name: str, kind: str, dtype: str, tmp_path: Path
) -> None:
    model = drawn(MODELS[name]())
    write_gguf(tmp_path / "it.gguf", model)
    model.save_pretrained(tmp_path / "folder")
    ours = our_logits(tmp_path / "it.gguf", dtype, kind)
    assert torch.equal(ours, our_logits(tmp_path / "folder", dtype, kind))
    torch.testing.assert_close(ours.float(), logits_of(model))


@pytest.mark.parametrize(
    ("name", "kind"), [("qwen2vl", "fused"), ("qwen3vl", "fused"), ("mistral3", "fused"), ("ministral3", "fused")]
)
def test_texts_of_models_whose_rotation_or_temperature_is_another(name: str, kind: str, tmp_path: Path) -> None:
    model = drawn(MODELS[name]())
    write_gguf(tmp_path / "it.gguf", model)
    served = load_model(tmp_path / "it.gguf", "float32")
    assert served.kind == kind and served.exactness.exact
    logits = served.forward([Rows(served.new_cache(), PROMPT)]).logits
    torch.testing.assert_close(logits, logits_of(model))


@pytest.mark.parametrize(
    ("type_name", "is_tied"), [*((name, False) for name in read_types()), ("Q8_0", True), ("Q6_K", True)]
)
def test_packed_weights_stand_for_what_the_gguf_package_says(type_name: str, is_tied: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "tie_word_embeddings": is_tied}
    model = llama(**sizes)
    meaning = write_gguf(tmp_path / "it.gguf", model, type_name)
    model.load_state_dict(meaning, strict=not is_tied)
    assert torch.equal(logits_of(load_transformers_model(tmp_path / "it.gguf", "float32")), logits_of(model))

    served = load_model(tmp_path / "it.gguf", "auto")
    assert served.dtype == (torch.bfloat16 if type_name == "BF16" else torch.float32)
    packed = served.packed_weights
    assert set(packed) == set(model.state_dict())
    for name, numbers in model.state_dict().items():
        assert torch.equal(packed[name].dequantize(torch.float32), numbers)
        assert packed[name].type_name == (type_name if numbers.dim() > 1 else "F32")
    assert (packed["lm_head.weight"] is packed["model.embed_tokens.weight"]) == is_tied
    assert packed["model.layers.0.self_attn.v_proj.weight"].blocks.base is not None  # not copied


def test_rounding_is_said_of_float_files_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for type_name, said in (("F16", ["float16"]), ("Q8_0", [])):
        write_gguf(tmp_path / "it.gguf", llama(), type_name)
        with caplog.at_level(logging.WARNING):
            assert load_model(tmp_path / "it.gguf", quantize="none").dtype == torch.bfloat16
        lines = [record.getMessage() for record in caplog.records]
        assert [line.partition(" are ")[2].partition(" ")[0] for line in lines] == said
        caplog.clear()


def llama3_factors(head_dim: int, base: float, factor: float, context: int = 8192) -> np.ndarray:
    """Compute the factors of llama.cpp's converter."""
    found = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * base ** (i / head_dim)
        smooth = min(1.0, max(0.0, (context / wavelength - 1) / 3))
        found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


SCALED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "linear, as it was written once": ({"rope_type": "linear", "factor": 4.0}, {"rope.scale_linear": 4.0}),
    "none": ({"rope_type": "default"}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_rope_scaling_of_the_metadata(name: str, tmp_path: Path) -> None:
    parameters, keys = SCALED[name]
    model = llama(rope_parameters={"rope_theta": 500.0, **parameters})
    write_gguf(tmp_path / "it.gguf", model, keys=keys)
    assert torch.equal(logits_of(load_transformers_model(tmp_path / "it.gguf", "float32")), logits_of(model))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3s_factors_become_its_parameters(factor: float, tmp_path: Path) -> None:
    parameters = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = llama(rope_parameters={"rope_theta": 500000.0, **parameters}, head_dim=64, max_position_embeddings=131072)
    factors = llama3_factors(64, 500000.0, factor)
    assert len(set(factors)) > 4  # some are neither 1 nor the factor
    write_gguf(tmp_path / "it.gguf", model, tensors={"rope_freqs.weight": factors})
    read = load_transformers_model(tmp_path / "it.gguf", "float32")
    assert read.config.rope_parameters == {"rope_theta": 500000.0, **parameters}
    assert torch.equal(logits_of(read), logits_of(model))


def test_other_factors_are_used_as_they_are(tmp_path: Path) -> None:
    model, factors = llama(), np.array([1.0, 1.5, 2.5, 2.0], np.float32)
    write_gguf(tmp_path / "it.gguf", model, tensors={"rope_freqs.weight": factors})
    model.model.rotary_emb.inv_freq /= torch.from_numpy(factors)
    torch.testing.assert_close(logits_of(load_transformers_model(tmp_path / "it.gguf", "float32")), logits_of(model))
    for kind in ("fused", "general"):
        torch.testing.assert_close(our_logits(tmp_path / "it.gguf", kind=kind), logits_of(model))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"general.architecture": "gemma3n"},
            "architecture 'gemma3n', and .* llama, .*mistral3, .*qwen2, .* folder or hub",
        ),
        ({"general.type": "adapter"}, "general.type is 'adapter'"),
        ({"attention.causal": False}, "attention.causal is False"),
        ({"logit_scale": 2.0}, "logit_scale is 2.0"),
        ({"rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
        ({"rope.dimension_sections": [2, 1, 1, 0]}, "rope.dimension_sections is "),
        ({"attention.temperature_scale": 0.5}, "attention.temperature_scale is 0.5"),
        ({"rope.dimension_count": 4}, "rope.dimension_count is 4 and the heads are 8 wide"),
        ({"attention.value_length": 16}, "attention.value_length is 16 and the heads are 8 wide"),
        ({"attention.head_count_kv": [2, 1]}, "head_count_kv differs from layer to layer"),
        ({"attention.sliding_window": 8, "attention.sliding_window_pattern": 2}, "sliding window of 8 positions"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "it.gguf", llama(), keys=keys)
    with pytest.raises(UnsupportedModelError, match=said):
        load_model(tmp_path / "it.gguf")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"general.architecture": 5}, "general.architecture is 5, but must be a string"),
        ({"block_count": None}, "block_count is missing"),
        ({"context_length": None}, "context_length is missing"),
        ({"embedding_length": None}, "embedding_length is missing"),
        ({"feed_forward_length": None}, "feed_forward_length is missing"),
        ({"attention.head_count": None}, "attention.head_count is missing"),
        ({"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"block_count": 0}, "block_count is 0"),
        ({"block_count": "two"}, "block_count is 'two'"),
        ({"block_count": 3}, r"it\.gguf speaks of 3 layers, and the weights have 2. Download"),
        ({"block_count": 2**32 - 1}, "speaks of 4294967295 layers"),
        ({"block_count": 1}, r"weights have model\.layers\.1, but the metadata of .* speaks of 1 layers only"),
        (
            {"feed_forward_length": 2**31},
            r"has shape \[64, 32\] .*, and \[2147483648, 32\] by the metadata",
        ),
        ({"attention.head_count": 5, "attention.key_length": None}, "embedding_length is 32, but must be a multiple"),
        ({"attention.layer_norm_rms_epsilon": math.nan}, "layer_norm_rms_epsilon is nan"),
        ({"rope.freq_base": math.inf}, "rope.freq_base is inf"),
    ],
)
def test_metadata_that_cannot_be(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "it.gguf", llama(), keys=keys)
    with pytest.raises(ModelLoadError, match=said) as caught:
        load_model(tmp_path / "it.gguf")
    assert "it.gguf" in str(caught.value)


def test_a_number_of_layers_that_a_configuration_would_make_a_list_of(tmp_path: Path) -> None:
    model = drawn(tf.Qwen2ForCausalLM(tf.Qwen2Config(**_SIZES)))
    write_gguf(tmp_path / "it.gguf", model, keys={"block_count": 2**32 - 1})
    with pytest.raises(ModelLoadError, match="speaks of 4294967295 layers"):
        load_model(tmp_path / "it.gguf")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("token_embd.weight"), "no tensor token_embd.weight"),
        (lambda tensors: tensors.pop("blk.1.ffn_up.weight"), r"lacks 1 weights, among them model\.layers\.1\.mlp\.up"),
        (
            lambda tensors: tensors.update({"blk.0.attn_qkv.weight": tensors["output.weight"]}),
            "has no place in a model",
        ),
        (lambda tensors: tensors.update({"blk.0.attn_q.bias": np.ones(32, np.float32)}), "lacks"),
        (
            lambda tensors: tensors.update({"rope_freqs.weight": np.zeros(4, np.float32)}),
            "does not hold 4 positive factors",
        ),
        (lambda tensors: tensors.update({"rope_freqs.weight": np.ones(3, np.float32)}), r"of the shape \[3\]"),
        (lambda tensors: tensors.update({"output_norm.weight": np.ones(31, np.float32)}), r"has shape \[31\]"),
    ],
)
def test_tensors_that_cannot_be(change: Callable[[dict[str, Any]], object], said: str, tmp_path: Path) -> None:
    import gguf

    write_gguf(tmp_path / "whole.gguf", llama())
    reader = gguf.GGUFReader(tmp_path / "whole.gguf")
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    change(tensors)
    writer = gguf.GGUFWriter(tmp_path / "it.gguf", "llama")
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(key, field.contents(), field.types[0])
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=said):
        load_model(tmp_path / "it.gguf")


def test_flipped_bits_in_a_models_metadata_never_crash(tmp_path: Path) -> None:
    """Flip bits of the metadata: GGUF has no checksum, so another valid value is accepted."""
    write_gguf(tmp_path / "it.gguf", llama(num_hidden_layers=1, vocab_size=8, hidden_size=8, intermediate_size=8))
    content = (tmp_path / "it.gguf").read_bytes()
    end = content.index(b"blk.0.")
    random = np.random.default_rng(2)
    refused = 0
    for place in random.choice(end, 40, replace=False):
        changed = bytearray(content)
        changed[place] ^= 1 << random.integers(8)
        (tmp_path / "it.gguf").write_bytes(changed)
        try:
            load_transformers_model(tmp_path / "it.gguf", "float32")
        except ModelLoadError:
            refused += 1
    assert refused > 20


def test_memory_never_holds_the_layers_twice(tmp_path: Path) -> None:
    model = llama()
    FusedDecoder(model)
    assert all(weight.is_meta for weight in model.model.layers.parameters()) and model.lm_head.weight.is_meta


def test_what_the_file_recommends_and_where_it_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = [chr(ord("a") + i) for i in range(26)] + ["ab"] + [f"<{i}>" for i in range(VOCAB - 27)]
    keys = {"general.sampling.temp": 0.5, "general.sampling.top_k": 0, "tokenizer.ggml.eos_token_id": 30}
    write_gguf(tmp_path / "it.gguf", llama(), "Q8_0", keys, tokens=tokens)
    with caplog.at_level(logging.INFO, "forerun.models.loading"):
        model = load_model(tmp_path / "it.gguf")
    assert 30 in model.eos_token_ids
    (line,) = [record.getMessage() for record in caplog.records]
    assert "the file recommends temperature 0.5;" in line
    read = load_transformers_model(tmp_path / "it.gguf", "float32")
    assert 30 in read.generation_config.eos_token_id


def test_what_the_files_say_goes_first(tmp_path: Path) -> None:
    """A generation configuration in the folder, then the file's own keys, then the table."""

    def loaded(**keys: Any) -> Any:
        write_gguf(tmp_path / "model.gguf", llama(), "Q8_0", {"general.name": "Gemma 3 270m", **keys})
        return load_model(tmp_path / "model.gguf")

    plain = loaded()
    assert plain.recommended_sampling == {} and "Gemma 3 270m" in plain.published_name
    own = loaded(**{"general.sampling.temp": 0.5})
    assert own.recommended_sampling == {"temperature": 0.5} and own.published_name == ""
    neutral = loaded(**{"general.sampling.temp": 1.0})
    assert neutral.recommended_sampling == {} and neutral.published_name == ""
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": 7}))
    beside = loaded(**{"general.sampling.temp": 0.5})
    assert beside.recommended_sampling == {"temperature": 1.0, "top_k": 7} and beside.published_name == ""


def test_a_vocabulary_of_another_size_than_the_embedding_is_refused(tmp_path: Path) -> None:
    tokens = [f"<{i}>" for i in range(VOCAB - 1)]
    write_gguf(tmp_path / "it.gguf", llama(), tokens=tokens)
    with pytest.raises(ModelLoadError, match=r"embed_tokens.weight has shape \[48, 32\] .* and \[47, 32\]"):
        load_model(tmp_path / "it.gguf")


def test_text_is_the_same_with_a_drafter_and_by_a_gguf_draft_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "it.gguf", llama(), "Q8_0")
    params = SamplingParams(max_tokens=24, temperature=0)
    plain = LLM(tmp_path / "it.gguf", None)
    expected = plain.generate(PROMPT, params).choices[0].token_ids
    assert plain.exact
    for drafter in ("suffix", "early-exit:exit_layer=1", tmp_path / "it.gguf", f"staged:model={tmp_path / 'it.gguf'}"):
        assert LLM(tmp_path / "it.gguf", drafter).generate(PROMPT, params).choices[0].token_ids == expected
    assert load_draft_model(tmp_path / "it.gguf").packed_weights
