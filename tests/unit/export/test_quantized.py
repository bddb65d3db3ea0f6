"""`forerun quantize`: a saved folder computes what quantizing at load does, and a damaged one is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from families import make_family
from forerun.errors import ConfigError, ModelLoadError, UnsupportedModelError
from forerun.export.quantized import export_quantized
from forerun.export.transformers import export_hf
from forerun.models import Rows, load_model
from gguf_files import write_gguf

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
Q = "model.layers.0.self_attn.q_proj.weight"


def logits(folder: Path, **settings: Any) -> torch.Tensor:
    model = load_model(folder, **settings)
    return model.forward([Rows(model.new_cache(), PROMPT)]).logits


def small_llama(folder: Path, **settings: Any) -> Path:
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=48, hidden_size=34, intermediate_size=65, num_hidden_layers=2, num_attention_heads=1, head_dim=32,
        num_key_value_heads=1, max_position_embeddings=512, eos_token_id=7, bos_token_id=None, **settings,
    )  # fmt: skip
    tf.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    export_quantized(small_llama(folder / "model"), folder / "int8", "int8")
    export_quantized(folder / "model", folder / "int4", "int4")
    return folder


@pytest.mark.parametrize(
    ("family", "quantize"),
    [
        *(("qwen2", "int8"), ("gpt2", "int4")),
        *(
            pytest.param(family, quantize, marks=pytest.mark.slow)
            for family in ("llama", "gpt2", "phi3")
            for quantize in ("int8", "int4")
            if (family, quantize) != ("gpt2", "int4")
        ),
    ],
)
def test_a_folder_computes_what_quantizing_at_load_does(quantize: Any, family: str, tmp_path: Path) -> None:
    source = make_family(family, tmp_path)
    exported = export_quantized(source, tmp_path / "out", quantize, max_shard_bytes=30_000)
    assert "model.safetensors.index.json" in exported.files and exported.dtype == quantize
    model = load_model(tmp_path / "out")
    assert model.quantize == quantize and model.exactness.exact
    assert torch.equal(logits(tmp_path / "out"), logits(source, quantize=quantize))
    assert model.num_parameters == exported.num_parameters == load_model(source).num_parameters


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_widths_that_are_odd_and_tied_layers(quantize: Any, is_tied: bool, tmp_path: Path) -> None:
    source = small_llama(tmp_path / "model", tie_word_embeddings=is_tied)
    export_quantized(source, tmp_path / "out", quantize)
    names = load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight.codes" in names) != is_tied
    kind = "codes" if quantize == "int8" else "packed_codes"
    assert names[f"{Q}.{kind}"].shape == (32, 34 if quantize == "int8" else 17)
    assert "model.layers.0.mlp.down_proj.weight.codes" in names  # 65 inputs
    assert torch.equal(logits(tmp_path / "out"), logits(source, quantize=quantize))
    assert load_model(tmp_path / "out").eos_token_ids == {7}


@pytest.mark.parametrize(("type_name", "quantize"), [("Q8_0", "int8"), ("Q4_1", "int4"), ("Q4_0", "int4")])
def test_gguf_blocks_are_saved_as_they_are(type_name: str, quantize: Any, tmp_path: Path) -> None:
    model = tf.AutoModelForCausalLM.from_pretrained(make_family("llama", tmp_path))
    write_gguf(tmp_path / "it.gguf", model, type_name)
    export_quantized(tmp_path / "it.gguf", tmp_path / "out", quantize)
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "it.gguf", quantize=quantize))


def test_what_the_weights_stand_for_can_be_exported(saved: Path, tmp_path: Path) -> None:
    export_hf(saved / "int8", tmp_path / "hf")
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    read = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    original = tf.AutoModelForCausalLM.from_pretrained(saved / "model")
    error = read.model.layers[0].mlp.up_proj.weight - original.model.layers[0].mlp.up_proj.weight
    assert 0 < error.abs().max() < 1e-3
    assert torch.equal(logits(tmp_path / "hf", quantize="int8"), logits(saved / "int8"))  # the same codes again


def test_other_bits_than_the_folders_can_be_asked_for(saved: Path) -> None:
    assert load_model(saved / "int8", quantize="int4").quantize == "int4"
    with pytest.raises(ConfigError, match="float64"):
        load_model(saved / "int8", "float64")


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_the_disk_space_that_is_checked_is_about_what_is_written(
    quantize: Any, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, checked = make_family(family, tmp_path), []
    monkeypatch.setattr("forerun.export.quantized.check_disk_space", lambda out, nbytes: checked.append(nbytes))
    exported = export_quantized(source, tmp_path / "out", quantize)
    written = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert exported.nbytes > 0 and 0.7 < checked[0] / written < 1.3


def test_the_card_says_what_it_is(tmp_path: Path) -> None:
    source = small_llama(tmp_path / "model")
    export_quantized(source, tmp_path / "out", "int4", cost=lambda: "Two percent of everything.")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# model, int4" in card and "Two percent of everything." in card and "8 bits" in card
    with pytest.raises(ConfigError):
        export_quantized(source, tmp_path / "out", "int8")
    export_quantized(source, tmp_path / "out", "int8", force=True)
    assert load_model(tmp_path / "out").quantize == "int8"
    with pytest.raises(ModelLoadError):
        export_quantized(tmp_path / "missing", tmp_path / "other", "int8")
    assert not (tmp_path / "other").exists()


Change = Callable[[dict[str, torch.Tensor]], Any]
DAMAGE: dict[str, tuple[str, Change, str]] = {
    "no scale": ("int8", lambda t: t.pop(f"{Q}.scale"), r"q_proj\.weight has codes only"),
    "no codes": ("int8", lambda t: t.pop(f"{Q}.codes"), r"q_proj\.weight has scale only"),
    "nothing": ("int8", lambda t: (t.pop(f"{Q}.codes"), t.pop(f"{Q}.scale")), "lacks 1 weights"),
    "both codes": (
        "int4",
        lambda t: t.update({f"{Q}.codes": torch.zeros(32, 34, dtype=torch.uint8)}),
        r"q_proj\.weight has codes, minimum, packed_codes, scale only",
    ),
    "other codes": ("int8", lambda t: t.update({f"{Q}.codes": t[f"{Q}.codes"].float()}), r"codes of .* is F32"),
    "wide scales": ("int4", lambda t: t.update({f"{Q}.scale": t[f"{Q}.scale"].double()}), r"scale of .* is F64"),
    "fewer scales": ("int4", lambda t: t.update({f"{Q}.scale": t[f"{Q}.scale"][:, :1].clone()}), r"shape \[32, 1\]"),
    "another shape": (
        "int8",
        lambda t: t.update({f"{Q}.codes": t[f"{Q}.codes"][:, :9].clone()}),
        r"has shape \[32, 9\]",
    ),
    "no matrix": ("int8", lambda t: t.update({f"{Q}.codes": t[f"{Q}.codes"].view(-1)}), "no matrix"),
    "NaN": ("int4", lambda t: t[f"{Q}.minimum"].fill_(torch.nan), "scale that is NaN or infinite"),
    "infinity": ("int8", lambda t: t[f"{Q}.scale"].fill_(torch.inf), "scale that is NaN or infinite"),
    "more bits": (
        "int4",
        lambda t: t["model.layers.0.mlp.down_proj.weight.codes"].fill_(16),
        r"down_proj\.weight has codes of more than 4 bits",
    ),
    "numbers too": ("int8", lambda t: t.update({Q: torch.zeros(32, 34)}), r"q_proj\.weight is there twice"),
    "one too many": ("int8", lambda t: t.update({"x.weight.scale": torch.ones(1, 1)}), r"x\.weight has scale only"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_folders_are_refused(name: str, saved: Path, tmp_path: Path) -> None:
    quantize, change, message = DAMAGE[name]
    for path in (saved / quantize).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quant_method": "aqlm"}, r"quantized by aqlm, .*Take another publication"),
        ({}, "quantized by a program that is not named"),
        ({"quant_method": "forerun", "format": 2, "quantize": "int8"}, "forerun's format 2, and this version reads 1"),
        ({"quant_method": "forerun", "format": 1, "quantize": "int3"}, "quantize"),
        ({"quant_method": "forerun", "format": "x", "quantize": "int8"}, "format"),
        ([], "quantization_config"),
    ],
    ids=str,
)
def test_weights_quantized_by_others_are_refused_by_name(said: Any, message: str, saved: Path, tmp_path: Path) -> None:
    for path in (saved / "int8").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "quantization_config": said}))
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_model(tmp_path)
    if isinstance(said, dict) and said.get("quant_method") != "forerun":
        assert isinstance(caught.value, UnsupportedModelError)


def test_what_a_language_model_inside_another_says_is_heard(saved: Path, tmp_path: Path) -> None:
    for path in (saved / "model").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    text = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "aqlm"}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text}))
    with pytest.raises(UnsupportedModelError, match="quantized by aqlm"):
        load_model(tmp_path)


def test_codes_without_a_word_of_them_are_refused(saved: Path, tmp_path: Path) -> None:
    for path in (saved / "int8").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelLoadError):
        load_model(tmp_path)
