"""Where GGUF files are searched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers as tf

from forerun.errors import ModelLoadError
from forerun.models import find_tokenizer, load_model, load_tokenizer
from forerun.models.loading.find_source import find_source
from forerun.utils import fetch as store
from gguf_files import write_gguf


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = tf.LlamaConfig(**sizes, num_attention_heads=2, bos_token_id=None, eos_token_id=None)
    path = tmp_path_factory.mktemp("healthy") / "it.gguf"
    write_gguf(path, tf.LlamaForCausalLM(config))
    return path


def test_a_file_a_folder_with_one_and_a_name_with_capitals(healthy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(healthy, folder / "IT.GGUF")
    for name in (healthy, str(healthy), folder, str(folder), folder / "IT.GGUF"):
        assert load_model(name, "float32").name == str(name)


def test_of_several_files_one_must_be_named(healthy: Path, tmp_path: Path) -> None:
    for name in ("q4.gguf", "q8.gguf"):
        shutil.copy(healthy, tmp_path / name)
    with pytest.raises(ModelLoadError, match=r"has several GGUF files \(q4.gguf, q8.gguf\). Give the one to load"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors"):
        load_model(tmp_path)


def test_a_file_of_a_hub_id_is_fetched_alone(healthy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def hf_hub_download(name: str, file: str) -> str:
        asked.append((name, file))
        return str(healthy)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    name = "someone/tiny-GGUF:tiny.Q8_0.gguf"
    assert load_model(name, "float32").name == name
    assert set(asked) == {("someone/tiny-GGUF", "tiny.Q8_0.gguf")}


def test_a_file_that_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("nowhere.gguf", "some/nowhere.gguf", tmp_path / "nowhere.gguf", Path("a/b:c.gguf")):
        with pytest.raises(ModelLoadError, match=r"does not exist. Give a .gguf file, or one of a hub id as"):
            load_model(name)
    with pytest.raises(ModelLoadError, match=r"x\.gguf cannot be fetched from the hub id someone/nowhere"):
        load_model("someone/nowhere:x.gguf")
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ModelLoadError, match=r"folder\.gguf has no config\.json"):
        load_model(tmp_path / "folder.gguf")  # a folder like any other
    with pytest.raises(ModelLoadError, match="home of a user who is not there"):
        load_model("~nobody-of-this-name/x.gguf")


def test_smollm2_before_and_after_it_is_fetched(healthy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelLoadError, match=r"smollm2 is not on this machine yet. Fetch it: forerun fetch smollm2"):
        load_model("smollm2")
    monkeypatch.setattr(store, "path_of", lambda name: healthy if name == "smollm2" else None)
    assert load_model("smollm2", "float32").name == "smollm2"


def test_a_file_without_a_tokenizer_is_served_by_token_ids(healthy: Path) -> None:
    assert find_tokenizer(healthy) is None
    with pytest.raises(ModelLoadError, match=r"it\.gguf"):
        load_tokenizer(healthy)
    source = find_source(healthy)
    assert source.eos_token_ids(source.config()) == frozenset()
