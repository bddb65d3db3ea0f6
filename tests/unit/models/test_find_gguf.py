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
from forerun.models.loading.folder_source import FolderSource
from forerun.models.loading.gguf.source import GgufSource
from forerun.models.loading.source import find_source
from forerun.utils import fetch as store
from gguf_files import write_gguf


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("healthy") / "it.gguf"
    write_gguf(path, tf.LlamaForCausalLM(_config()))
    return path


def _config(num_hidden_layers: int = 1) -> tf.LlamaConfig:
    sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": num_hidden_layers}
    return tf.LlamaConfig(**sizes, num_attention_heads=2, bos_token_id=None, eos_token_id=None)


def test_a_file_a_folder_with_one_and_a_name_with_capitals(healthy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(healthy, folder / "IT.GGUF")
    for name in (healthy, str(healthy), folder, str(folder), folder / "IT.GGUF"):
        assert load_model(name, "float32").name == str(name)


def test_of_several_files_one_must_be_named(healthy: Path, tmp_path: Path) -> None:
    for name in ("q4.gguf", "mmproj-F16.gguf", "q8.gguf"):
        shutil.copy(healthy, tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelLoadError, match=r"has several GGUF files \(q4.gguf, q8.gguf\). Give the one to load"):
        load_model(tmp_path)
    (tmp_path / "q8.gguf").unlink()
    source = find_source(tmp_path)  # what encodes pictures is no model, and config.json says nothing of the weights
    assert isinstance(source, GgufSource) and source.path.name == "q4.gguf"
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert isinstance(find_source(tmp_path), FolderSource)


def test_a_blob_without_a_name_is_known_by_its_first_bytes(healthy: Path, tmp_path: Path) -> None:
    blob = tmp_path / "sha256-b179c9523d0e"
    shutil.copy(healthy, blob)
    assert load_model(blob, "float32").name == str(blob)
    blob.write_bytes(b"PK\3\4")
    with pytest.raises(ModelLoadError, match="sha256-b179c9523d0e is neither a folder nor a GGUF file"):
        load_model(blob)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    torch.manual_seed(0)
    write_gguf(tmp_path / "it.gguf", tf.LlamaForCausalLM(_config()), split=5)
    found = sorted(tmp_path.glob("it-0000?-of-00003.gguf"))
    assert len(found) == 3
    return found


def test_parts_are_opened_as_they_lie(healthy: Path, parts: list[Path]) -> None:
    whole = find_source(healthy).checkpoint(find_source(healthy).config(), torch.float32)
    for name in (*parts, parts[0].parent):
        source = find_source(name)
        found = source.checkpoint(source.config(), torch.float32)
        assert found.slices.keys() == whole.slices.keys()
        assert all(torch.equal(found.slices[each][...], whole.slices[each][...]) for each in whole.slices)


def test_a_part_that_is_missing_or_of_another_model_is_named(parts: list[Path], tmp_path: Path) -> None:
    shutil.copy(parts[0], parts[2])
    with pytest.raises(ModelLoadError, match=r"it-00003-of-00003.gguf: by its metadata it is part 0 of 3, .* 2 of 3"):
        load_model(parts[1])
    other = tmp_path / "other"
    other.mkdir()
    write_gguf(other / "it.gguf", tf.LlamaForCausalLM(_config(num_hidden_layers=2)), split=8)
    shutil.copy(other / parts[2].name, parts[2])
    with pytest.raises(ModelLoadError, match=r"it-00003-of-00003.gguf: it is part of a model of 21 tensors, .* of 12"):
        load_model(parts[0])
    parts[2].unlink()
    for name in (*parts[:2], tmp_path):
        with pytest.raises(
            ModelLoadError, match=r"one of 3 parts of a model, and it-00003-of-00003.gguf is not beside"
        ):
            load_model(name)
    lone = tmp_path / "lone.gguf"
    parts[0].rename(lone)
    with pytest.raises(ModelLoadError, match=r"lone.gguf: by its metadata it is part 0 of 3, .* by its name 0 of 1"):
        load_model(lone)


@pytest.fixture
def cache(healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache with two quantizations of one model, the second in parts in a folder of its own."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--tiny-GGUF"
    snapshot = repository / "snapshots" / ("a" * 40)
    (snapshot / "Q8_0").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    for file in ("tiny-Q4_K_M.gguf", "tiny-Q4_K_S.gguf", "mmproj-Q8_0.gguf"):
        shutil.copy(healthy, snapshot / file)
    write_gguf(snapshot / "Q8_0" / "tiny-Q8_0.gguf", tf.LlamaForCausalLM(_config()), split=8)
    return snapshot


def test_a_model_of_the_hubs_cache_is_found_by_its_quantization(cache: Path) -> None:
    for which, file in (("Q4_K_M", "tiny-Q4_K_M.gguf"), ("q8_0", "Q8_0/tiny-Q8_0-00001-of-00002.gguf")):
        source = find_source(f"someone/tiny-GGUF:{which}")
        assert isinstance(source, GgufSource) and source.path == cache / file
        source.config()
    source = find_source("someone/tiny-GGUF:Q8_0/tiny-Q8_0-00002-of-00002.gguf")
    assert isinstance(source, GgufSource) and source.file.path == cache / "Q8_0/tiny-Q8_0-00001-of-00002.gguf"
    with pytest.raises(
        ModelLoadError, match=r"no GGUF file of that name or quantization .*has tiny-Q8_0-.*tiny-Q4_K_M"
    ):
        find_source("someone/tiny-GGUF:Q4_K")
    with pytest.raises(ModelLoadError, match=r"someone/nothing:Q4_0: the hub's cache .*\(it has none\)"):
        find_source("someone/nothing:Q4_0")


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
