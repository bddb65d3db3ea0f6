"""Where the files of a model are searched."""

from __future__ import annotations

import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from families import make_family
from forerun.errors import ModelLoadError
from forerun.models import load_model
from forerun.models.loading.folder import ModelFolder

HUB_FILES = {
    *("config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "model-f16.safetensors"),
    *("modeling_evil.py", "pytorch_model.bin", "training_args.bin", "onnx/model.onnx", "original/consolidated.pth"),
    *("other/config.json", "other/model.safetensors", "model.gguf", "weights.pkl", "a/config.json", "ad/x/y.json"),
    *("additional_chat_templates/tool_use.jinja", "additional_chat_templates/evil.py"),
}


def test_of_the_hub_neither_code_nor_pickles_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_family("llama", tmp_path / "source")
    fetched: set[str] = set()

    def snapshot_download(name: str, allow_patterns: list[str], ignore_patterns: list[str], **_: Any) -> str:
        assert name == "someone/tiny"
        for file in HUB_FILES:
            if any(fnmatch(file, p) for p in allow_patterns) and not any(fnmatch(file, p) for p in ignore_patterns):
                fetched.add(file)
                if (source / file).exists():
                    shutil.copy(source / file, tmp_path / "cache")
        return str(tmp_path / "cache")

    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert load_model("someone/tiny", "float32").name == "someone/tiny"
    assert fetched == {
        *("config.json", "generation_config.json", "tokenizer.json", "model.safetensors"),
        "additional_chat_templates/tool_use.jinja",
    }


def test_a_hub_id_that_cannot_be_fetched_is_our_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("someone/nowhere", "not a hub id"):
        with pytest.raises(ModelLoadError, match=f"{name} is neither a folder nor .* as a hub id"):
            load_model(name)
    with pytest.raises(ModelLoadError, match=r"Did you mean smollm2\?"):
        load_model("smolm2")


def test_a_path_is_a_folder_and_never_a_hub_id() -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        ModelFolder.find(Path("someone/tiny"))


def test_a_cached_snapshot_is_served_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repo, commit = tmp_path / "models--someone--tiny", "0" * 40
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots").mkdir()
    make_family("llama", tmp_path / "source").rename(repo / "snapshots" / commit)
    assert load_model("someone/tiny", "float32").num_layers == 2
