"""Finds the source of a model by the name that a user gives."""

from __future__ import annotations

from pathlib import Path
from weakref import WeakValueDictionary

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
        return _of_file(text, path)
    if text.lower().endswith(SUFFIX) and not local_path(name).is_dir():
        return _of_file(text, _gguf_file(name))
    folder = ModelFolder.find(name)
    if folder.is_remote or (folder.path / CONFIG).is_file():  # what a cache happens to hold decides nothing
        return FolderSource(folder)
    files = sorted(path for path in folder.path.iterdir() if path.suffix.lower() == SUFFIX)
    if len(files) > 1:
        names = ", ".join(path.name for path in files[:8]) + (", ..." if len(files) > 8 else "")
        raise ModelLoadError(f"model folder {name} has several GGUF files ({names}). Give the one to load.")
    return _of_file(text, files[0]) if files else FolderSource(folder)


_in_use: WeakValueDictionary[tuple[object, ...], GgufSource] = WeakValueDictionary()
"""By name and by what the file system says of the file: reading a header takes half a second."""


def _of_file(name: str, path: Path) -> GgufSource:
    """Return the source of a file: the one that is in use, if there is one and the file is still the same."""
    try:
        found = path.stat()
    except (OSError, ValueError):  # opening it says why
        return GgufSource(name, path)
    key = (name, path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    return _in_use.setdefault(key, GgufSource(name, path))


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
