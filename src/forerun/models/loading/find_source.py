"""Finds the source of a model by the name that a user gives."""

from __future__ import annotations

from pathlib import Path

from forerun.errors import ModelLoadError
from forerun.models.loading.folder import CONFIG, ModelFolder, download_file, local_path
from forerun.models.loading.folder_source import FolderSource
from forerun.models.loading.gguf.file import SUFFIX
from forerun.models.loading.gguf.source import GgufSource
from forerun.models.loading.source import ModelSource
from forerun.utils import fetch as store


def find_source(name: str | Path) -> ModelSource:
    """Return the source of a model.

    Args:
        name: "smollm2" or another model that `forerun fetch` brings; a bundled model; a GGUF file, or a folder with one
            and no config.json; a Transformers folder; for a string, also a hub id, or one of its GGUF files
            ("owner/name:file.gguf").

    Raises:
        ModelLoadError: there is none, it cannot be fetched, or a folder holds several GGUF files.
    """
    text = str(name)
    if text in store.names():
        path = store.path_of(text)
        if path is None:
            raise ModelLoadError(f"{text} is not on this machine yet. Fetch it: forerun fetch {text}")
        return GgufSource(text, path)
    if text.lower().endswith(SUFFIX) and not local_path(name).is_dir():
        return GgufSource(text, _gguf_file(name))
    folder = ModelFolder.find(name)
    if folder.is_remote or (folder.path / CONFIG).is_file():  # what a cache happens to hold decides nothing
        return FolderSource(folder)
    files = sorted(path for path in folder.path.iterdir() if path.suffix.lower() == SUFFIX)
    if len(files) > 1:
        names = ", ".join(path.name for path in files[:8]) + (", ..." if len(files) > 8 else "")
        raise ModelLoadError(f"model folder {name} has several GGUF files ({names}). Give the one to load.")
    return GgufSource(text, files[0]) if files else FolderSource(folder)


def _gguf_file(name: str | Path) -> Path:
    """Return the path of a local file, or fetch OWNER/NAME:FILE from the hub."""
    path = local_path(name)
    hub_id, colon, file = str(name).partition(":")
    if not (path.exists() or path.is_absolute() or isinstance(name, Path)) and colon and hub_id.count("/") == 1:
        return download_file(hub_id, file)
    if not path.exists():
        raise ModelLoadError(
            f"model file {name} does not exist. Give a .gguf file, or one of a hub id as OWNER/NAME:FILE{SUFFIX}."
        )
    return path
