"""Block heads in the `speculators` form: read, written, and refused by name."""

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

from forerun.drafters.models.block.config import BlockConfig
from forerun.drafters.models.head_files.folder import head_header, load_head, save_head
from forerun.drafters.models.heads.fingerprint import target_fingerprint
from forerun.errors import ConfigError, ForerunError, ModelLoadError, UnsupportedModelError
from forerun.export import vllm
from forerun.export.vllm import export_vllm
from forerun.models import Model, load_model
from head_cases import random_d2t

NUM_LAYERS = 12
DFLASH = BlockConfig(
    vocab_size=96,
    draft_vocab_size=40,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=40,
    layers=(1, 6, 9),
    block_size=5,
    mask_token_id=7,
)
DSPARK = replace(DFLASH, markov_rank=6, confidence=True, sample_from_anchor=True)
WHOLE = replace(DSPARK, draft_vocab_size=96, confidence_with_markov=False, sample_from_anchor=False, rope_theta=500.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": NUM_LAYERS, "intermediate_size": 40}
    config = tf.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
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


def tensors_of(config: BlockConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in config.tensors().items()}


def exported(config: BlockConfig, target: Path, model: Model, folder: Path, **options: Any) -> Any:
    d2t = random_d2t(config)  # type: ignore[arg-type]
    save_head(folder / "head", config, tensors_of(config), d2t, fingerprint=target_fingerprint(model))
    return export_vllm(folder / "head", folder / "out", str(target), **options)


@pytest.mark.parametrize("config", [DFLASH, DSPARK, WHOLE], ids=["dflash", "dspark", "whole"])
def test_what_is_written_is_read(config: BlockConfig, target: Path, model: Model, tmp_path: Path) -> None:
    written = exported(config, target, model, tmp_path)
    read = load_head(tmp_path / "out", NUM_LAYERS)
    assert head_header(tmp_path / "out", NUM_LAYERS).config == read.config
    assert read.config == replace(config, own_output_rows=True, max_positions=model.context_length)
    assert read.form == "speculators"
    expected, d2t = tensors_of(config), random_d2t(config)  # type: ignore[arg-type]
    ids = torch.arange(config.draft_vocab_size) + (0 if d2t is None else d2t)
    expected["lm_head.weight"] = model.output_rows(ids)
    assert read.tensors.keys() == expected.keys()
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in expected.items())
    assert (read.d2t is None) == (d2t is None) and (d2t is None or torch.equal(read.d2t, d2t))  # type: ignore[arg-type]
    kind = "dspark" if config.markov_rank else "dflash"
    assert written.speculative == {"method": kind, "model": str(tmp_path / "out"), "num_speculative_tokens": 3}


def test_what_vllm_reads(target: Path, model: Model, tmp_path: Path) -> None:
    """Check the names for which vLLM would otherwise use a default."""
    exported(replace(DSPARK, sample_from_anchor=False), target, model, tmp_path, num_draft_tokens=5)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["speculators_model_type"] == "dspark" and said["block_size"] == 6
    assert said["aux_hidden_state_layer_ids"] == [1, 6, 9] and said["mask_token_id"] == 7
    assert (said["sample_from_anchor"], said["sliding_window_non_causal"]) == (False, True)
    assert (said["markov_rank"], said["markov_head_type"], said["enable_confidence_head"]) == (6, "vanilla", True)
    layer = said["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"], layer["layer_types"]) == (
        "qwen3",
        2,
        ["full_attention"] * 2,
    )
    assert said["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    shapes = {name: list(tensor.shape) for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items()}
    assert shapes["markov_head.markov_w1.weight"] == [96, 6] and shapes["markov_head.markov_w2.weight"] == [40, 6]
    assert shapes["layers.1.self_attn.q_norm.weight"] == [8] and shapes["confidence_head.proj.weight"] == [1, 38]
    assert shapes["fc.weight"] == [32, 96] and shapes["d2t"] == [40] and shapes["t2d"] == [96]


UNSAYABLE: list[tuple[dict[str, Any], str]] = [
    ({"mask_token_id": None}, "a vector that was learnt for the mask"),
    ({"norm_before_fc": True}, "norms of states"),
    ({"markov_shared": True}, "train without the key markov_shared"),
    (
        {"context_tokens": True, "num_layers": 1, "mask_token_id": None, "sample_from_anchor": False},
        "train without the key context_tokens",
    ),
    ({"sliding_window": 64}, "sliding_window"),
    ({"layers": (1, 12)}, r"after the target's final norm \(layer 12"),
    ({"markov_rank": 0}, "a confidence without a Markov bias"),
]


@pytest.mark.parametrize(("changed", "said"), UNSAYABLE)
def test_what_cannot_be_said(changed: dict[str, Any], said: str, target: Path, model: Model, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        exported(replace(DSPARK, **changed), target, model, tmp_path)
    assert not (tmp_path / "out").exists()


def test_other_forms_and_longer_drafts_are_refused(target: Path, model: Model, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no other form than 'speculators'"):
        exported(DFLASH, target, model, tmp_path, form="eagle")
    with pytest.raises(ConfigError, match=r"num_draft_tokens is 6, but .* blocks of 5 tokens"):
        exported(DFLASH, target, model, tmp_path, num_draft_tokens=6)


def changed(folder: Path, tensors: Callable[[dict[str, Tensor]], object] | None = None, **config: Any) -> None:
    said = json.loads((folder / "config.json").read_text())
    layer = config.pop("layer", {})
    said |= config
    said["transformer_layer_config"] |= layer
    found = load_file(folder / "model.safetensors")
    if tensors is not None:
        tensors(found)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in said.items() if value != "absent"}))
    save_file(found, folder / "model.safetensors")


REFUSED: list[tuple[dict[str, Any], type[ForerunError], str]] = [
    ({"markov_head_type": "rnn"}, UnsupportedModelError, "markov_head_type is rnn, and only vanilla"),
    ({"projector_type": "domino"}, UnsupportedModelError, "projector_type is domino"),
    ({"layer": {"model_type": "llama"}}, UnsupportedModelError, "model_type is 'llama'"),
    (
        {"layer": {"layer_types": ["sliding_attention"] * 2}},
        UnsupportedModelError,
        "layer_types has 'sliding_attention'",
    ),
    ({"layer": {"attention_bias": True}}, ModelLoadError, r"layers\.0\.self_attn\.k_proj\.bias \[16\] is missing"),
    ({"layer": {"rope_parameters": {"rope_type": "yarn"}}}, ModelLoadError, "rotation yarn has no 'factor' among"),
    ({"aux_hidden_state_layer_ids": [1, 6, 12]}, UnsupportedModelError, "state of layer 12, and the target has 12"),
    ({"target_hidden_size": 64}, UnsupportedModelError, "is 32 wide and its target 64"),
    ({"block_size": 1}, ModelLoadError, "block_size of the head is 0"),
    ({"mask_token_id": 96}, ModelLoadError, "mask_token_id of the head is 96"),
    ({"mask_token_id": "absent"}, ModelLoadError, "mask_token_id"),
    ({"tensors": lambda found: found.pop("hidden_norm.weight")}, ModelLoadError, "hidden_norm.weight .* is missing"),
    ({"tensors": lambda found: found.pop("lm_head.weight")}, ModelLoadError, "lm_head.weight is missing"),
    ({"tensors": lambda found: found.pop("d2t")}, ModelLoadError, "d2t is missing"),
    ({"markov_rank": 5}, ModelLoadError, r"markov_w1.weight has shape \[96, 6\], and must have \[96, 5\]"),
    ({"tensors": lambda found: found.update(extra=torch.ones(2))}, ModelLoadError, "extra is none of such"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_not_served_or_damaged_is_said(number: int, target: Path, model: Model, tmp_path: Path) -> None:
    change, error, said = REFUSED[number]
    exported(replace(DSPARK, sample_from_anchor=False), target, model, tmp_path)
    changed(tmp_path / "out", **change)
    with pytest.raises(error, match=said):
        load_head(tmp_path / "out", NUM_LAYERS)


def test_keys_that_are_left_out_have_their_defaults(target: Path, model: Model, tmp_path: Path) -> None:
    exported(DFLASH, target, model, tmp_path)
    changed(
        tmp_path / "out", sample_from_anchor="absent", sliding_window_non_causal="absent", target_hidden_size="absent"
    )
    assert load_head(tmp_path / "out", NUM_LAYERS).config.block_size == 5  # type: ignore[attr-defined]
