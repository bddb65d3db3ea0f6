from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as tf

from families import make_family
from forerun.errors import ConfigError, ModelLoadError, UnsupportedModelError
from forerun.models import load_model, load_tokenizer

TINY = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_family("llama", tmp_path)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_model(tmp_path / "nowhere")


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load_model(tmp_path)


def test_broken_config(llama: Path) -> None:
    (llama / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json: it is not JSON"):
        load_model(llama)


def test_unknown_architecture(llama: Path) -> None:
    (llama / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ModelLoadError, match="'no-such-model' is not one that Transformers"):
        load_model(llama)


def test_pickled_weights_are_refused(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    torch.save({}, llama / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="only pickled weights"):
        load_model(llama)


def test_missing_weights(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors"):
        load_model(llama)


def test_truncated_weights(llama: Path) -> None:
    weights = llama / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: the weights are damaged"):
        load_model(llama)


def test_missing_tensor_is_not_filled_with_noise(llama: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(llama / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="up_proj"):
        load_model(llama)


def test_unknown_dtype_kind_and_device(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"float8.*float32 for float16"):
        load_model(llama, dtype="float8")
    with pytest.raises(ConfigError, match="fast"):
        load_model(llama, kind="fast")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="device is 'abacus'"):
        load_model(llama, device="abacus")


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    tf.T5Config(vocab_size=32, d_model=16, num_layers=1, num_heads=2, d_ff=16).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        load_model(tmp_path)


def test_state_space_model_is_refused(tmp_path: Path) -> None:
    config = tf.MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4)
    tf.MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="mamba"):
        load_model(tmp_path)


def test_attention_outside_the_interface_is_refused(tmp_path: Path) -> None:
    config = tf.BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2)
    tf.BloomForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="Bloom"):
        load_model(tmp_path)


def test_no_tokenizer(llama: Path) -> None:
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        load_tokenizer(llama)
