"""`forerun models`, and the names that the shell completes."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from forerun.cli.models import model_summary
from forerun.cli.options import complete_models
from forerun.errors import ModelLoadError

from .conftest import Invoke


def header(*keys: tuple[str, object], num_keys: int | None = None) -> bytes:
    """A GGUF file without tensors: texts and 32-bit numbers."""
    made = b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys) if num_keys is None else num_keys)
    for key, value in keys:
        made += struct.pack("<Q", len(key)) + key.encode()
        if isinstance(value, str):
            made += struct.pack("<IQ", 8, len(value)) + value.encode()
        else:
            made += struct.pack("<II", 4, value)
    return made


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FORERUN_MODELS", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "tiny.gguf").write_bytes(header(("general.architecture", "qwen2"), ("general.file_type", 15)))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    return tmp_path


def test_what_is_listed(invoke: Invoke, folder: Path) -> None:
    result = invoke("models")
    assert result.exit_code == 0
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines()}
    assert rows["bundled"][1:] == ["26", "MB", "bfloat16", "llama", "draft-model", "forerun"]
    assert rows["tiny"][1:6] == ["102", "bytes", "Q4_K_M", "qwen2", "–"]
    assert rows["bad"][1:4] == ["–", "–", "–"] and "bad.gguf: its header is cut off" in result.stderr
    found = {each["name"]: each for each in json.loads(invoke("models", "--json").stdout)}
    assert found["tiny"]["path"] == str(folder / "tiny.gguf") and found["tiny"]["format"] == "Q4_K_M"
    assert found["bad"]["fault"] and found["bundled"]["drafter"] == "draft-model"


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is not there"):
        model_summary(tmp_path / "none.gguf")
    (tmp_path / "text").write_text("text")
    with pytest.raises(ModelLoadError, match="is no GGUF file"):
        model_summary(tmp_path / "text")


def test_the_vocabulary_is_not_read(tmp_path: Path) -> None:
    """What follows the keys is cut off, and nobody sees it."""
    path = tmp_path / "it.gguf"
    path.write_bytes(header(("general.architecture", "llama"), ("general.file_type", 7), num_keys=9))
    assert model_summary(path) == {"bytes": path.stat().st_size, "format": "Q8_0", "family": "llama"}


def test_the_shell_knows_the_names(invoke: Invoke, folder: Path) -> None:
    assert complete_models("ti") == ["tiny"] and "bundled" in complete_models("")
    for words in ("serve ti", "generate -m ti", "generate --draft-model ti", "bench forward ti", "info ti"):
        line = f"forerun {words}"
        asked = {"_FORERUN_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        assert invoke(env=asked, prog_name="forerun").stdout.split() == ["tiny"], words
