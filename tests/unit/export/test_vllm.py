"""Heads for vLLM: what is written says the same head, and what cannot be said is refused by name.

That vLLM loads and serves them was tried by hand: docs/vllm.md.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file
from torch import Tensor

from forerun.drafters.models.eagle.config import EagleConfig
from forerun.drafters.models.head_files.folder import load_head, save_head
from forerun.drafters.models.heads.fingerprint import target_fingerprint
from forerun.errors import ConfigError, IncompatibleDrafterError, ModelLoadError, UnsupportedModelError
from forerun.export import vllm
from forerun.export.vllm import export_vllm
from forerun.models import Model, load_model
from head_cases import EAGLE_1, EAGLE_3, random_d2t, random_tensors

NUM_LAYERS = 12
NORMS = replace(EAGLE_3, norm_before_fc=True, norm_output=True, norm_before_residual=True, sliding_window=64)
WITH_ROWS = replace(EAGLE_3, own_output_rows=True)
WHOLE = replace(EAGLE_3, draft_vocab_size=96)
TWO_STATES = replace(EAGLE_3, layers=(1, 9))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("target") / "target"
    tf.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(target: Path) -> Model:
    return load_model(target)


@pytest.fixture(autouse=True)
def loaded_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a target takes a second."""
    monkeypatch.setattr(vllm, "load_model", lambda name: model)


def save(folder: Path, config: EagleConfig, model: Model, **options: Any) -> dict[str, Tensor]:
    tensors = random_tensors(config)
    save_head(folder, config, tensors, random_d2t(config), fingerprint=target_fingerprint(model), **options)
    return tensors


@pytest.mark.parametrize("form", ["eagle", "speculators"])
@pytest.mark.parametrize("config", [EAGLE_1, EAGLE_3, NORMS, WITH_ROWS, WHOLE, TWO_STATES], ids=range(6))
def test_round_trip(config: EagleConfig, form: str, target: Path, model: Model, tmp_path: Path) -> None:
    tensors = save(tmp_path / "head", config, model)
    if form == "speculators" and config in (EAGLE_1, TWO_STATES):
        with pytest.raises(UnsupportedModelError, match=r"no EAGLE-1|2 states in place of 3"):
            export_vllm(tmp_path / "head", tmp_path / "out", str(target), form=form)
        assert not (tmp_path / "out").exists()
        return
    export_vllm(tmp_path / "head", tmp_path / "out", str(target), form=form)
    read = load_head(tmp_path / "out", NUM_LAYERS)
    written = {"own_output_rows": config.version == 3, "max_positions": model.context_length}
    assert read.config == replace(config, **written)
    assert model.context_length > config.max_positions  # beyond which vLLM would lose its drafts
    d2t = random_d2t(config)
    ids = torch.arange(config.draft_vocab_size) + (0 if d2t is None else d2t)
    if config.version == 3:
        tensors.setdefault("lm_head.weight", model.output_rows(ids))
    assert read.tensors.keys() == tensors.keys()
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in tensors.items())
    assert (read.d2t is None) == (d2t is None) and (d2t is None or torch.equal(read.d2t, d2t))  # type: ignore[arg-type]


def test_what_vllm_reads(target: Path, model: Model, tmp_path: Path) -> None:
    """The names by which vLLM finds what it would otherwise take a default for."""
    save(tmp_path / "head", NORMS, model)
    exported = export_vllm(tmp_path / "head", tmp_path / "out", str(target), num_draft_tokens=5)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: said[key] for key in ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")} == {
        "fc_norm": True,
        "norm_before_fc": False,
        "norm_output": True,
        "norm_before_residual": True,
    }
    assert said["eagle_aux_hidden_state_layer_ids"] == [1, 6, 9]
    assert (said["layer_types"], said["sliding_window"]) == (["sliding_attention"], 64)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["d2t"].dtype == torch.int64
    assert stored["t2d"].nonzero().flatten().tolist() == (torch.arange(40) + stored["d2t"]).tolist()
    expected = {"method": "eagle3", "model": str(tmp_path / "out"), "num_speculative_tokens": 5}
    assert exported.speculative == expected
    assert json.loads((tmp_path / "out" / "speculative_config.json").read_text()) == expected
    assert set(exported.files.files) == {path.name for path in (tmp_path / "out").iterdir()}


def test_speculators_say_their_target(target: Path, model: Model, tmp_path: Path) -> None:
    save(tmp_path / "head", EAGLE_3, model)
    export_vllm(tmp_path / "head", tmp_path / "out", str(target), form="speculators")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["speculators_config"]["verifier"] == {
        "name_or_path": str(target),
        "architectures": ["LlamaForCausalLM"],
    }
    assert said["norm_before_residual"] is False  # vLLM takes true where it is missing
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert "layers.0.hidden_norm.weight" in names and not any(name.startswith("midlayer") for name in names)


def test_codes_and_number_formats(target: Path, model: Model, tmp_path: Path) -> None:
    save(tmp_path / "head", EAGLE_3, model, quantize="int8")
    export_vllm(tmp_path / "head", tmp_path / "out", str(target))
    read, stored = load_head(tmp_path / "out", NUM_LAYERS), load_head(tmp_path / "head")
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in stored.tensors.items())
    assert export_vllm(tmp_path / "head", tmp_path / "half", str(target), dtype="bfloat16").files.dtype == "bfloat16"
    assert all(tensor.dtype == torch.bfloat16 for tensor in load_head(tmp_path / "half", 12).tensors.values())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (replace(EAGLE_3, embedding_residual=True), "embedding_residual"),
        (replace(EAGLE_3, layers=(1, 6, 12)), r"after the target's final norm \(layer 12\)"),
        (replace(EAGLE_3, hidden_size=16), "a width of 16 for a target of 32"),
        (replace(EAGLE_1, sliding_window=8), "sliding_window"),
        (replace(EAGLE_1, draft_vocab_size=40), "draft vocabulary"),
        (replace(EAGLE_1, own_output_rows=True), "own_output_rows"),
        (replace(EAGLE_1, layers=(11,)), r"layers \[11\] in place of \[12\]"),
    ],
)
def test_what_cannot_be_said(config: EagleConfig, said: str, target: Path, model: Model, tmp_path: Path) -> None:
    save(tmp_path / "head", config, model)
    with pytest.raises(UnsupportedModelError, match=said):
        export_vllm(tmp_path / "head", tmp_path / "out", str(target))
    assert not (tmp_path / "out").exists()


def test_an_order_of_its_own_cannot_be_said(target: Path, tmp_path: Path) -> None:
    d2t = torch.arange(95, -1, -1) - torch.arange(96)
    save_head(tmp_path / "head", WHOLE, random_tensors(WHOLE), d2t)
    with pytest.raises(UnsupportedModelError, match="an order of the output tokens"):
        export_vllm(tmp_path / "head", tmp_path / "out", str(target))


def test_a_head_of_another_target(target: Path, tmp_path: Path) -> None:
    save_head(tmp_path / "head", EAGLE_1, random_tensors(EAGLE_1), fingerprint="96-32-1--")
    with pytest.raises(IncompatibleDrafterError, match="trained for another target"):
        export_vllm(tmp_path / "head", tmp_path / "out", str(target))


def test_places_and_words_that_are_wrong(target: Path, model: Model, tmp_path: Path) -> None:
    save(tmp_path / "head", EAGLE_1, model)
    with pytest.raises(ConfigError, match="head exists"):
        export_vllm(tmp_path / "head", tmp_path / "head", str(target))
    with pytest.raises(ConfigError, match="form is 'gguf'"):
        export_vllm(tmp_path / "head", tmp_path / "out", str(target), form="gguf")
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        export_vllm(tmp_path, tmp_path / "out", str(target))
    export_vllm(tmp_path / "head", tmp_path / "out", str(target))
    (tmp_path / "out" / "notes.txt").write_text("mine")
    export_vllm(tmp_path / "head", tmp_path / "out", str(target), dtype="bfloat16", force=True)
    assert (tmp_path / "out" / "notes.txt").exists()
