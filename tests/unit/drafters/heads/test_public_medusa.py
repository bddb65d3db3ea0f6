"""Medusa heads in vLLM's form and under the original repository's names; what contradicts itself is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.drafters.models.head_files.folder import head_header, load_head, save_head
from forerun.drafters.models.heads.fingerprint import target_fingerprint
from forerun.drafters.models.medusa.config import MedusaConfig
from forerun.errors import ConfigError, ModelLoadError, UnsupportedModelError
from forerun.export import vllm
from forerun.export.vllm import export_vllm
from forerun.models import Model, load_model

NUM_LAYERS = 2
PLAIN = MedusaConfig(vocab_size=96, draft_vocab_size=96, target_hidden_size=32, num_heads=3, layers=(NUM_LAYERS,))
REDUCED = replace(PLAIN, draft_vocab_size=40, num_layers=2)
CONFIGS = {
    "the target's rows": PLAIN,
    "reduced": REDUCED,
    "one": replace(REDUCED, output_rows="one"),
    "each": replace(REDUCED, output_rows="each", accuracies=(0.1,) * 24),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=NUM_LAYERS, num_attention_heads=4, intermediate_size=40
    )
    folder = tmp_path_factory.mktemp("target") / "target"
    tf.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(target: Path) -> Model:
    return load_model(target)


@pytest.fixture(autouse=True)
def loaded_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load a target once; loading takes a second."""
    monkeypatch.setattr(vllm, "load_model", lambda name: model)


def made(config: MedusaConfig) -> tuple[dict[str, Tensor], Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in config.tensors().items()}
    size = config.draft_vocab_size
    if size == config.vocab_size:
        return tensors, None
    return tensors, torch.randperm(96, generator=generator)[:size].sort().values - torch.arange(size)


def save(folder: Path, config: MedusaConfig, model: Model) -> tuple[dict[str, Tensor], Tensor | None]:
    tensors, d2t = made(config)
    save_head(folder, config, tensors, d2t, fingerprint=target_fingerprint(model))
    return tensors, d2t


@pytest.mark.parametrize("kind", CONFIGS)
def test_round_trip(kind: str, target: Path, model: Model, tmp_path: Path) -> None:
    config = CONFIGS[kind]
    tensors, d2t = save(tmp_path / "head", config, model)
    exported = export_vllm(tmp_path / "head", tmp_path / "out", str(target))
    assert exported.speculative["method"] == "medusa" and exported.speculative["num_speculative_tokens"] == 3
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["medusa_fc_bias"] is True and said["original_lm_head"] is (config.output_rows != "each")
    assert [key for key in said if "num" in key and ("heads" in key or "layers" in key)] == [
        "num_heads",
        "num_hidden_layers",
    ]
    read = load_head(tmp_path / "out", NUM_LAYERS)
    assert head_header(tmp_path / "out", NUM_LAYERS).config == read.config
    written = {"output_rows": "one"} if config.output_rows == "target" else {}
    assert read.config == replace(config, accuracies=(), **written)  # type: ignore[arg-type]
    if config.output_rows == "target":
        ids = torch.arange(config.draft_vocab_size) + (0 if d2t is None else d2t)
        tensors["lm_head.weight"] = model.output_rows(ids)
    assert read.tensors.keys() == tensors.keys()
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in tensors.items())
    assert (read.d2t is None) == (d2t is None) and (d2t is None or torch.equal(read.d2t, d2t))  # type: ignore[arg-type]
    assert "Medusa" in read.summary()["head"]


def test_fewer_heads_are_written_if_fewer_tokens_are_asked_for(target: Path, model: Model, tmp_path: Path) -> None:
    save(tmp_path / "head", PLAIN, model)
    exported = export_vllm(tmp_path / "head", tmp_path / "out", str(target), num_draft_tokens=2, dtype="bfloat16")
    assert exported.speculative["num_speculative_tokens"] == 2
    assert load_head(tmp_path / "out", NUM_LAYERS).config == replace(PLAIN, num_heads=2, output_rows="one")
    with pytest.raises(ConfigError, match="has 3 heads, which draft no 4 tokens"):
        export_vllm(tmp_path / "head", tmp_path / "more", str(target), num_draft_tokens=4)


@pytest.mark.parametrize(
    ("config", "form", "said"),
    [
        (replace(PLAIN, sequential=True), "medusa", "sequential"),
        (PLAIN, "speculators", "no Medusa"),
        (PLAIN, "eagle", "no Medusa"),
    ],
)
def test_what_cannot_be_said(
    config: MedusaConfig, form: str, said: str, target: Path, model: Model, tmp_path: Path
) -> None:
    save(tmp_path / "head", config, model)
    with pytest.raises(UnsupportedModelError, match=said):
        export_vllm(tmp_path / "head", tmp_path / "out", str(target), form=form)
    assert not (tmp_path / "out").exists()


def public(folder: Path, model: Model, target: Path, config: MedusaConfig = CONFIGS["each"]) -> Path:
    save(folder / "head", config, model)
    export_vllm(folder / "head", folder / "out", str(target))
    return folder / "out"


def change(folder: Path, tensors: Callable[[dict[str, Tensor]], Any] = lambda _: None, **settings: Any) -> None:
    """Change a key of a public folder; None removes it."""
    said = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps({key: value for key, value in said.items() if value is not None}))
    kept = load_file(folder / "model.safetensors")
    tensors(kept)
    save_file(kept, folder / "model.safetensors")


def test_the_original_repositorys_names(target: Path, model: Model, tmp_path: Path) -> None:
    folder = public(tmp_path, model, target)
    expected = load_head(folder, NUM_LAYERS)

    def rename(kept: dict[str, Tensor]) -> None:
        for name in list(kept):
            if name.startswith("blocks."):
                _, head, _, layer, leaf = name.split(".")
                kept[f"medusa_heads.{head}.{layer}.linear.{leaf}"] = kept.pop(name)
            elif name.startswith("lm_heads."):
                kept[f"{name.split('.')[1]}.2.weight"] = kept.pop(name)

    change(folder, rename)
    read = load_head(folder, NUM_LAYERS)
    assert read.config == expected.config
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in expected.tensors.items())


def test_rows_of_the_whole_vocabulary_are_cut_by_the_map(target: Path, model: Model, tmp_path: Path) -> None:
    folder = public(tmp_path, model, target, CONFIGS["one"])
    whole = torch.randn(96, 32)
    change(folder, lambda kept: kept.update({"lm_head.weight": whole}))
    read = load_head(folder, NUM_LAYERS)
    assert read.d2t is not None
    assert torch.equal(read.tensors["lm_head.weight"], whole[torch.arange(40) + read.d2t])


def test_heads_without_biases(target: Path, model: Model, tmp_path: Path) -> None:
    folder = public(tmp_path, model, target)
    change(folder, medusa_fc_bias=None)
    with pytest.raises(ModelLoadError, match=r"there is blocks\.0\.layers\.0\.bias, but config\.json does not say"):
        load_head(folder, NUM_LAYERS)

    def without(kept: dict[str, Tensor]) -> None:
        for name in [name for name in kept if name.endswith("bias")]:
            del kept[name]

    change(folder, without)
    assert not any(t.any() for name, t in load_head(folder, NUM_LAYERS).tensors.items() if name.endswith("bias"))
    change(folder, medusa_fc_bias=True)
    with pytest.raises(ModelLoadError, match=r"blocks\.0\.layers\.0\.bias \[32\] is missing"):
        load_head(folder, NUM_LAYERS)


@pytest.mark.parametrize(
    ("tensors", "settings", "said"),
    [
        (lambda kept: kept.pop("lm_heads.2.weight"), {}, r"lm_heads\.2\.weight \[40, 32\] is missing"),
        (lambda kept: kept.pop("blocks.1.layers.0.weight"), {}, r"blocks\.1\.layers\.0\.weight \[32, 32\] is missing"),
        (lambda kept: kept.update({"other": torch.ones(2)}), {}, "the tensor other is none"),
        (lambda kept: kept["blocks.0.layers.0.weight"].fill_(torch.nan), {}, "NaN"),
        (lambda kept: kept["token_map"].fill_(3), {}, "the same token"),
        (lambda kept: kept["token_map"].add_(90), {}, "outside of the target's 96"),
        (lambda kept: kept.update(token_map=torch.arange(39)), {}, r"token_map is \[39\]"),
        (lambda kept: None, {"num_heads": 2}, "is none of such"),
        (lambda kept: None, {"num_heads": None}, "num_heads is missing"),
        (lambda kept: None, {"num_attention_heads": 4}, "num_attention_heads would be taken for num_heads"),
        (lambda kept: None, {"hidden_size": 16}, r"has shape"),
        (lambda kept: None, {"truncated_vocab_size": 97}, "97 output tokens"),
        (lambda kept: None, {"logit_scale": 0.5}, "logit_scale"),
    ],
)
def test_what_does_not_fit_together(
    tensors: Any, settings: dict[str, Any], said: str, target: Path, model: Model, tmp_path: Path
) -> None:
    folder = public(tmp_path, model, target)
    change(folder, tensors, **settings)
    with pytest.raises(ModelLoadError, match=said):
        load_head(folder, NUM_LAYERS)


def test_pickles_and_missing_weights(target: Path, model: Model, tmp_path: Path) -> None:
    folder = public(tmp_path, model, target)
    with pytest.raises(ModelLoadError, match="depends on the target's number of layers"):
        load_head(folder)
    (folder / "model.safetensors").rename(folder / "medusa_lm_head.pt")
    with pytest.raises(ModelLoadError, match="pickled"):
        load_head(folder, NUM_LAYERS)
