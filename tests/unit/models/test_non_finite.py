"""The weight tensor that caused a NaN is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from families import make_family
from forerun.lab.bench.priced_run import EchoModel
from forerun.models import load_model
from forerun.models.model import first_non_finite_tensor


def damage(folder: Path, name: str, value: float) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, weights, metadata={"format": "pt"})


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize(
    ("family", "tensor", "said", "dtype"),
    [
        ("llama", "model.embed_tokens.weight", "model.embed_tokens.weight", "bfloat16"),
        (
            "llama",
            "model.layers.1.self_attn.v_proj.weight",
            "model.layers.1.self_attn.q_proj (query, key and value).weight",
            "bfloat16",
        ),
        ("qwen3", "model.layers.0.self_attn.k_norm.weight", "model.layers.0.self_attn.k_norm.weight", "float32"),
        ("llama", "model.norm.weight", "model.norm.weight", "float64"),
        ("gpt2", "transformer.h.1.attn.c_proj.bias", "transformer.h.1.attn.c_proj.bias", "float32"),
        ("gpt2", "transformer.h.0.mlp.c_fc.weight", "transformer.h.0.mlp.c_fc.weight", "bfloat16"),
    ],
)
def test_the_tensor_is_named(family: str, tensor: str, said: str, dtype: str, tmp_path: Path) -> None:
    folder = make_family(family, tmp_path)
    if family == "qwen3":
        assert first_non_finite_tensor(load_model(folder, dtype)) is None
    damage(folder, tensor, float("nan") if dtype != "bfloat16" else float("-inf"))
    model = load_model(folder, dtype)
    assert first_non_finite_tensor(model) == said
    assert first_non_finite_tensor(EchoModel(model)) == said


def test_the_tensor_is_named_by_native_models_too(tmp_path: Path) -> None:
    for name in ("model.layers.1.self_attn.v_proj.weight", "model.norm.weight", "lm_head.weight"):
        folder = make_family("llama", tmp_path / name)
        damage(folder, name, float("nan"))
        assert first_non_finite_tensor(load_model(folder, "bfloat16")) in (
            name,
            "model.layers.1.self_attn.q_proj (query, key and value).weight",  # without native kernels
        )


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.usefixtures("native_library")
def test_the_bias_of_a_native_model_is_named(quantize: str | None, tmp_path: Path) -> None:
    folder, name = make_family("qwen2", tmp_path), "model.layers.0.self_attn.k_proj.bias"
    damage(folder, name, float("inf"))
    assert first_non_finite_tensor(load_model(folder, "bfloat16", quantize=quantize)) == name


def test_a_model_of_another_kind_has_no_weights_to_look_at() -> None:
    class Other:
        name = "other"

    assert first_non_finite_tensor(Other()) is None  # type: ignore[arg-type]
