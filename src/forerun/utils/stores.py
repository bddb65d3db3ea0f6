"""The models that other programs keep on this machine, read in place: Ollama's store, LM Studio's, folders of GGUF
files and the Hub's cache. Only names of files are read, and Ollama's manifests."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from forerun.config import BUNDLED_MODELS, MODELS_VARIABLE
from forerun.errors import ModelLoadError
from forerun.utils import fetch
from forerun.utils.json_file import Fields

SUFFIX = ".gguf"
_PART = re.compile(r"-(\d{5})-of-\d{5}$")
_REGISTRY = ("registry.ollama.ai", "library")
"""Host and owner of Ollama's own models, which their names leave out."""
_MODEL_LAYER = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model of another program's, or of a folder.

    Attributes:
        name: that commands take.
        path: its file, or first part, or its folder; it may be missing.
        place: whose it is.
    """

    name: str
    path: Path
    place: str


def stored_models(folders: Iterable[Path] = ()) -> list[StoredModel]:
    """Return the models that lie on this machine, sorted by place and name. What cannot be read is left out; a model
    whose name loads another one has its path as its name.

    folders: further ones with GGUF files, whose names are their paths.
    """
    ollamas = [*_of_ollama()]
    found = [*ollamas, *_in_folders(_gguf_folders()), *_of_lm_studio(), *_of_hub()]  # as `find_stored` looks
    known = {each.path for each in found}
    found += [replace(each, name=str(each.path)) for each in _in_folders(folders) if each.path not in known]
    taken = {**BUNDLED_MODELS, **{name: fetch.path_of(name) for name in fetch.fetchable_names()}}
    for each in ollamas:
        if "/" not in each.name:
            taken.setdefault(each.name.removesuffix(":latest"), each.path)
    named = (
        each if taken.setdefault(each.name, each.path) == each.path else replace(each, name=str(each.path))
        for each in found
    )
    return sorted({*named}, key=lambda each: (each.place, each.name))


def find_stored(name: str) -> Path | None:
    """Return where a model of this name lies; None if there is none. What the Hub's cache holds is left to the Hub's
    own reader.

    Raises:
        ModelLoadError: Ollama's store names a file that is not there.
    """
    for store in _ollama_stores():
        manifest = _manifest(store, name)
        if manifest is not None and os.path.isfile(manifest):  # noqa: PTH113 -- Path's raises where it is unreadable
            path = _blob(store, manifest, name)
            if not os.path.exists(path):  # noqa: PTH110
                raise ModelLoadError(
                    f"{name}: Ollama's store {store} says that its file is {path.name}, which is not there. Fetch it "
                    f"anew: ollama pull {name}"
                )
            return path
    if "/" in name or "\\" in name:
        return None
    for folder in _gguf_folders():
        if found := [each.path for each in _in_folders([folder]) if each.name == name]:
            return found[0]
    return next((each.path for each in _of_lm_studio() if each.name == name), None)


def siblings(path: Path) -> list[StoredModel]:
    """Return all models of the store that holds this file; none if no store does."""
    stores = [*_of_ollama()], [*_of_lm_studio()]
    return next((found for found in stores if any(each.path == path for each in found)), [])


def stored_name(path: Path) -> str:
    """Return what commands call a model that lies there: its path, or of Ollama, whose paths say nothing, its name."""
    stored = _of_ollama() if path.parent.name == "blobs" else ()
    return next((each.name for each in stored if each.path == path), str(path))


def first_part(path: Path) -> bool:
    """Return whether a GGUF file is a model or its first part: no other part, and no encoder of pictures."""
    part = _PART.search(path.stem)
    return "mmproj" not in path.name.lower() and (part is None or int(part[1]) == 1)


def _home() -> Path | None:
    with suppress(RuntimeError):
        return Path.home()
    return None


def _gguf_folders() -> list[Path]:
    """Return the folders of FORERUN_MODELS, and llama.cpp's cache."""
    named = [Path(each).expanduser() for each in os.environ.get(MODELS_VARIABLE, "").split(os.pathsep) if each]
    home = _home()
    cache = os.environ.get("LLAMA_CACHE") or (home and home / ".cache" / "llama.cpp")
    return [*named, *([Path(cache)] if cache else [])]


def _in_folders(folders: Iterable[Path]) -> Iterator[StoredModel]:
    for folder in folders:
        for path in _files(folder, f"*{SUFFIX}"):
            yield StoredModel(_PART.sub("", path.stem), path, str(folder))


def _files(folder: Path, pattern: str) -> list[Path]:
    with suppress(OSError):
        return sorted(path for path in folder.glob(pattern) if path.is_file() and first_part(path))
    return []


def _ollama_stores() -> list[Path]:
    if chosen := os.environ.get("OLLAMA_MODELS"):
        return [Path(chosen).expanduser()]
    home = _home()
    own = [] if home is None else [home / ".ollama" / "models"]
    return [*own, Path("/usr/share/ollama/.ollama/models")]


def _manifest(store: Path, name: str) -> Path | None:
    """Return where Ollama's store has the manifest of a name such as qwen3:4b or hf.co/owner/name:Q4_K_M; None if it is
    no such name."""
    model, _, tag = name.partition(":")
    parts = model.split("/")
    if len(parts) == 2 and not tag:
        return None  # that is a hub id
    if not all(re.fullmatch(r"\w[\w.-]*", each) for each in (*parts, tag or "latest")) or len(parts) > 3:
        return None
    return store.joinpath("manifests", *_REGISTRY[: 3 - len(parts)], *parts, tag or "latest")


def _blob(store: Path, manifest: Path, name: str) -> Path:
    """Return the model's file of a manifest. Raises ModelLoadError if it names none."""
    fields = Fields.read(manifest, ModelLoadError, remedy=f"Fetch it anew: ollama pull {name}")
    for number, layer in enumerate(fields.list_of("layers", dict)):
        entry = Fields.of(layer, f"{manifest}: layer {number}", ModelLoadError)
        if entry.string("mediaType", "") == _MODEL_LAYER and (digest := _DIGEST.fullmatch(entry.string("digest"))):
            return store / "blobs" / f"sha256-{digest[1]}"
    raise ModelLoadError(f"{name}: {manifest} of Ollama's names no file of a model. Take another one.")


def _of_ollama() -> Iterator[StoredModel]:
    for store in _ollama_stores():
        manifests = store / "manifests"
        with suppress(OSError):
            for path in sorted(manifests.glob("*/*/*/*")):
                *owner, model, tag = path.relative_to(manifests).parts
                hidden = 2 if tuple(owner) == _REGISTRY else int(owner[0] == _REGISTRY[0])
                name = "/".join([*owner[hidden:], model]) + f":{tag}"
                with suppress(ModelLoadError):
                    yield StoredModel(name, _blob(store, path, name), "Ollama")


def _of_lm_studio() -> Iterator[StoredModel]:
    home = _home()
    if home is None:
        return
    base = home / ".lmstudio"
    with suppress(OSError, UnicodeDecodeError):
        base = Path((home / ".lmstudio-home-pointer").read_text(encoding="utf-8").strip() or base)
    for folder in (base / "models", home / ".cache" / "lm-studio" / "models"):
        for path in _files(folder, f"*/*/*{SUFFIX}"):
            yield StoredModel(_PART.sub("", path.stem), path, "LM Studio")


def hub_snapshots(pattern: str = "*") -> Iterator[Path]:
    """Return the main snapshot of each model of the Hub's cache."""
    from huggingface_hub import constants

    for ref in sorted(Path(constants.HF_HUB_CACHE).glob(f"models--{pattern}/refs/main")):
        snapshot = None
        with suppress(OSError, UnicodeDecodeError):  # of a damaged entry, which is nobody's
            snapshot = ref.parents[1] / "snapshots" / ref.read_text().strip()
            snapshot = snapshot if snapshot.is_dir() else None
        if snapshot is not None:
            yield snapshot


def hub_id(snapshot: Path) -> str:
    """Return the id of a snapshot of the Hub's cache."""
    return snapshot.parents[1].name.removeprefix("models--").replace("--", "/")


def _of_hub() -> Iterator[StoredModel]:
    for snapshot in hub_snapshots():
        if (snapshot / "config.json").is_file() and any(snapshot.glob("*.safetensors")):
            yield StoredModel(hub_id(snapshot), snapshot, "the Hub's cache")
        for path in _files(snapshot, f"*{SUFFIX}"):
            yield StoredModel(f"{hub_id(snapshot)}:{path.name}", path, "the Hub's cache")
