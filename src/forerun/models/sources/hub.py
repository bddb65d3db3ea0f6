"""What is fetched from the Hugging Face hub, into the hub's own cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forerun.config import BUNDLED_MODELS
from forerun.fetch import store
from forerun.files.foreign_errors import as_load_errors

_REMEDY = "Check its name and the network."


def download_files(name: str, patterns: Sequence[str]) -> Path:
    """The cached folder of a hub id, with the files of these names in it; folders inside it are left out.

    Raises:
        ModelLoadError: there is no such id, or it can neither be reached nor found in the cache.
    """
    from huggingface_hub import snapshot_download

    bundled = ", ".join((*BUNDLED_MODELS, *store.names()))
    what = f"{name} is neither a folder nor one of {bundled}, and cannot be fetched as a hub id"
    with as_load_errors(what, _REMEDY):
        return Path(snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=["*/*"]))


def download_file(name: str, file: str) -> Path:
    """One file of a hub id, in the cache.

    Raises:
        ModelLoadError: as `download_files`.
    """
    from huggingface_hub import hf_hub_download

    with as_load_errors(f"{file} cannot be fetched from the hub id {name}", _REMEDY):
        return Path(hf_hub_download(name, file))
