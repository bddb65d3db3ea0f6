"""Models of other programs' stores: their names, their files, and what is missing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from forerun.drafters.build import build_drafter, check_drafter_text
from forerun.drafters.registry import with_draft_model
from forerun.errors import DrafterError, ModelLoadError
from forerun.models.loading.source import find_source
from forerun.utils.stores import find_stored, siblings, stored_models, stored_name

DIGEST = "ab" * 32
MODEL = "application/vnd.ollama.image.model"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "FORERUN_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def put(path: Path, content: bytes = b"GGUF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def pull(store: Path, place: str, digest: str = DIGEST, kind: str = MODEL) -> Path:
    """Put a model into Ollama's store, and return its file."""
    layers = [{"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:" + "0" * 64}]
    layers.append({"mediaType": kind, "digest": f"sha256:{digest}"})
    put(store / "manifests" / place, json.dumps({"schemaVersion": 2, "layers": layers}).encode())
    return put(store / "blobs" / f"sha256-{digest}")


@pytest.mark.parametrize(
    ("place", "names"),
    [
        (
            "registry.ollama.ai/library/qwen3/4b",
            ["qwen3:4b", "library/qwen3:4b", "registry.ollama.ai/library/qwen3:4b"],
        ),
        ("registry.ollama.ai/library/qwen3/latest", ["qwen3:latest", "qwen3"]),
        ("registry.ollama.ai/me/mine/v1", ["me/mine:v1"]),
        ("hf.co/owner/Some-GGUF/Q4_K_M", ["hf.co/owner/Some-GGUF:Q4_K_M"]),
    ],
)
def test_names_of_ollama(home: Path, place: str, names: list[str]) -> None:
    blob = pull(home / ".ollama" / "models", place)
    assert [each.name for each in stored_models()] == names[:1]
    assert {find_stored(name) for name in names} == {blob}
    assert find_stored("qwen3:8b") is None and find_stored("../qwen3") is None and find_stored("a/../../b:c") is None


def test_two_parts_without_a_tag_are_a_hub_id(home: Path) -> None:
    blob = pull(home / ".ollama" / "models", "registry.ollama.ai/me/mine/latest")
    assert find_stored("me/mine") is None and find_stored("me/mine:latest") == blob


def test_every_command_takes_such_a_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "elsewhere"))
    blob = pull(home / "elsewhere", "registry.ollama.ai/library/qwen3/4b")
    source = find_source("qwen3:4b")
    assert (source.name, source.path) == ("qwen3:4b", blob)  # type: ignore[attr-defined]
    with pytest.raises(ModelLoadError, match="Did you mean qwen3:4b"):
        find_source("qwen3:4c")


def test_a_missing_blob_is_told(home: Path) -> None:
    store = home / ".ollama" / "models"
    pull(store, "registry.ollama.ai/library/qwen3/4b").unlink()
    with pytest.raises(
        ModelLoadError, match=f"sha256-{DIGEST}, which is not there. Fetch it anew: ollama pull qwen3:4b"
    ):
        find_stored("qwen3:4b")
    assert [each.name for each in stored_models()] == ["qwen3:4b"]


def test_damaged_manifests_are_told_and_not_listed(home: Path) -> None:
    store = home / ".ollama" / "models"
    pull(store, "registry.ollama.ai/library/other/v1", kind="application/vnd.ollama.image.tensor")
    put(store / "manifests/registry.ollama.ai/library/broken/v1", b"{")
    pull(store, "registry.ollama.ai/library/escaping/v1", digest="../../x")
    assert stored_models() == []
    for name, told in (("other:v1", "names no file"), ("broken:v1", "it is not JSON"), ("escaping:v1", "no file")):
        with pytest.raises(ModelLoadError, match=told):
            find_stored(name)


@pytest.mark.parametrize("closed", ["models", "blobs"])
def test_an_unreadable_store_has_no_models(home: Path, monkeypatch: pytest.MonkeyPatch, closed: str) -> None:
    pull(home / ".ollama" / "models", "registry.ollama.ai/library/qwen3/4b")
    stat = os.stat

    def refuse(path: object, **given: object) -> os.stat_result:
        if f"/{closed}/" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **given)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr("os.stat", refuse)
    if closed == "models":
        assert find_stored("qwen3:4b") is None
        return
    with pytest.raises(ModelLoadError, match="which is not there"):
        find_stored("qwen3:4b")


def test_folders_lm_studio_and_the_hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_MODELS", os.pathsep.join([str(home / "mine"), str(home / "none")]))
    mine = put(home / "mine" / "tiny-Q8_0.gguf")
    parts = [put(home / "mine" / f"large-0000{number}-of-00002.gguf") for number in (1, 2)]
    put(home / "mine" / "mmproj-tiny.gguf")
    llama = put(home / ".cache" / "llama.cpp" / "cached.gguf")
    studio = put(home / "studio" / "models" / "owner" / "repository" / "theirs.gguf")
    put(home / ".lmstudio-home-pointer", str(home / "studio").encode())
    snapshot = home / "hub" / "models--owner--name" / "snapshots" / "1"
    put(snapshot.parents[1] / "refs" / "main", b"1")
    put(snapshot / "config.json", b"{}")
    put(snapshot / "model.safetensors")
    packed = put(snapshot / "it-Q4_K_M.gguf")
    found = {each.name: each.path for each in stored_models()}
    named = {"tiny-Q8_0": mine, "large": parts[0], "cached": llama, "theirs": studio}
    assert found == named | {"owner/name": snapshot, "owner/name:it-Q4_K_M.gguf": packed}
    assert {name: find_stored(name) for name in named} == named
    assert [each.name for each in stored_models([home / "studio" / "models" / "owner" / "repository"])].count(
        "theirs"
    ) == 1


def test_a_name_that_loads_another_model_is_not_listed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_MODELS", os.pathsep.join([str(home / "a"), str(home / "b")]))
    names = ("it", "smollm2", "bundled", "qwen3")
    files = {folder: [put(home / folder / f"{name}.gguf") for name in names] for folder in ("a", "b")}
    theirs = put(home / ".lmstudio" / "models" / "owner" / "repository" / "it.gguf")
    blob = pull(home / ".ollama" / "models", "registry.ollama.ai/library/qwen3/latest")
    paths = [theirs, *files["a"][1:], *files["b"]]
    found = {each.name: each.path for each in stored_models()}
    assert found == {"it": files["a"][0], "qwen3:latest": blob} | {str(path): path for path in paths}
    assert all(find_source(name).path == path for name, path in found.items())  # type: ignore[attr-defined]


def test_a_model_of_two_tags_has_two_names(home: Path) -> None:
    for tag in ("4b", "latest"):
        pull(home / ".ollama" / "models", f"registry.ollama.ai/library/qwen3/{tag}")
    assert [each.name for each in stored_models()] == ["qwen3:4b", "qwen3:latest"]


def test_such_a_name_drafts(home: Path) -> None:
    """It is not taken for module:Class."""
    pull(home / ".ollama" / "models", "registry.ollama.ai/library/qwen3/latest")
    drafter, _ = build_drafter("qwen3:latest")
    assert type(drafter).__name__ == "DraftModel"
    with pytest.raises(DrafterError, match="neither a known name"):
        build_drafter("qwen3:8b")
    check_drafter_text(with_draft_model("auto", "qwen3:latest"), "bundled")


def test_models_of_one_store_lie_beside_each_other(home: Path) -> None:
    store = home / ".ollama" / "models"
    large = pull(store, "registry.ollama.ai/library/qwen3/4b")
    small = pull(store, "registry.ollama.ai/library/qwen3/small", digest="cd" * 32)
    assert {each.path for each in siblings(large)} == {large, small}
    assert siblings(home / "else.gguf") == []
    assert stored_name(large) == "qwen3:4b"
    (store / "manifests").rename(store / "elsewhere")
    assert stored_name(large) == str(large)


def test_the_name_of_a_plain_file_needs_no_manifest(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.utils.stores._of_ollama", lambda: pytest.fail("the store is read"))
    assert stored_name(home / "a.gguf") == str(home / "a.gguf")
