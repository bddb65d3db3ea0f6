"""Finds the source of a model by the name that a user gives."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from forerun.errors import ModelLoadError
from forerun.models.loading.folder import (
    CONFIG,
    GGUF_SUFFIX,
    ModelFolder,
    cached_folder,
    download_file,
    is_gguf,
    local_path,
    part_paths,
)
from forerun.models.loading.folder_source import FolderSource
from forerun.models.loading.source import ModelSource
from forerun.utils import fetch as store
from forerun.utils.deferred import DeferredModule

if TYPE_CHECKING:
    from forerun.models.loading.gguf import source as gguf
    from forerun.models.loading.gguf.source import GgufSource
else:
    gguf = DeferredModule("forerun.models.loading.gguf.source")

_HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+):([^:]+)")


def find_source(name: str | Path) -> ModelSource:
    """Return the source of a model.

    Args:
        name: "smollm2" or another model that `forerun fetch` brings; a bundled model; a GGUF file or any part of one,
            whatever it is called; a folder with one GGUF model and no safetensors; a Transformers folder; for a string,
            also a hub id, or one of its GGUF models ("owner/name:file.gguf", "owner/name:Q4_K_M").

    Raises:
        ModelLoadError: there is none, it cannot be fetched, or there are several GGUF models.
    """
    text = str(name)
    path = local_path(name)
    if text in store.fetchable_names():
        fetched = store.path_of(text)
        if fetched is None:
            raise ModelLoadError(f"{text} is not on this machine yet. Fetch it: forerun fetch {text}")
        return _of_file(text, fetched)
    on_hub = None if isinstance(name, Path) or path.exists() else _HUB_FILE.fullmatch(text)
    if on_hub is not None:
        return _of_file(text, _on_hub(on_hub[1], on_hub[2]))
    if is_gguf(path):
        if not any(part.exists() for part in part_paths(path)):
            raise ModelLoadError(
                f"model file {name} does not exist. Give a .gguf file, or one of a hub id as "
                f"OWNER/NAME:FILE{GGUF_SUFFIX}."
            )
        return _of_file(text, path)
    folder = ModelFolder.find(name)
    has_safetensors = any(folder.path.glob("*.safetensors"))
    if folder.is_remote or (has_safetensors and (folder.path / CONFIG).is_file()):
        return FolderSource(folder)  # what a cache happens to hold decides nothing
    files = gguf_models(folder.path.iterdir())
    return _of_file(text, _only(files, f"model folder {name}")) if files else FolderSource(folder)


def gguf_models(paths: Iterable[Path]) -> list[Path]:
    """Return the GGUF models among files, of those in parts the first part. Encoders of pictures and sounds, which
    llama.cpp calls mmproj, are none."""
    files = (path for path in paths if path.suffix.lower() == GGUF_SUFFIX and not path.is_dir())
    return sorted({part_paths(path)[0] for path in files if "mmproj" not in path.name.lower()})


def _only(files: list[Path], place: str) -> Path:
    """Return the only file. Raises ModelLoadError, which lists them, if there are several."""
    if len(files) > 1:
        names = ", ".join(path.name for path in files[:16]) + (", ..." if len(files) > 16 else "")
        raise ModelLoadError(f"{place} has several GGUF files ({names}). Give the one to load.")
    return files[0]


def _on_hub(hub_id: str, which: str) -> Path:
    """Return the path of a GGUF model in the cache of a hub id, by its file's name or by its quantization. A file that
    is not there is fetched, with the other parts of its model."""
    folder = cached_folder(hub_id)
    if which.lower().endswith(GGUF_SUFFIX):
        parts = [str(part) for part in part_paths(Path(which))]
        first, *_ = (
            folder / part if folder and (folder / part).exists() else download_file(hub_id, part) for part in parts
        )
        return first
    files = gguf_models(folder.rglob("*")) if folder else []
    pattern = re.compile(rf"(?:^|[-._]){re.escape(which)}(?:[-.]|$)", re.IGNORECASE)
    found = [path for path in files if pattern.search(path.stem) or path.parent.name.lower() == which.lower()]
    if not found:
        there = ", ".join(path.name for path in files[:16]) or "none"
        raise ModelLoadError(
            f"{hub_id}:{which}: the hub's cache on this machine has no GGUF file of that name or quantization of "
            f"{hub_id} (it has {there}). Give the file, which is then fetched: {hub_id}:FILE{GGUF_SUFFIX}."
        )
    return _only(found, f"{hub_id}:{which}")


_in_use: WeakValueDictionary[tuple[object, ...], GgufSource] = WeakValueDictionary()
"""By name and by what the file system says of the files: reading a header takes half a second."""


def _of_file(name: str, path: Path) -> GgufSource:
    """Return the source of a file: the one that is in use, if there is one and the files are still the same."""
    try:
        found = [part.stat() for part in part_paths(path)]
    except (OSError, ValueError):  # opening it says why
        return gguf.GgufSource(name, path)
    key = (name, path, *((each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns) for each in found))
    return _in_use.setdefault(key, gguf.GgufSource(name, path))
