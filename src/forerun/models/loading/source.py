"""The interface of a model's source, whatever kind of files it lies in, and the source of a name that a user gives."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from forerun.config import BUNDLED_MODELS
from forerun.errors import ModelLoadError
from forerun.kernels.block_weight import BLOCK_TYPES, BlockType, BlockWeight
from forerun.kernels.quantize import QuantizedFormat, QuantizedWeight
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
from forerun.models.loading.weights import Checkpoint
from forerun.models.spec.decoder import DecoderSpec
from forerun.utils import fetch as store
from forerun.utils.deferred import DeferredModule
from forerun.utils.stores import find_stored

if TYPE_CHECKING:
    from forerun.models.loading import folder_source
    from forerun.models.loading.gguf import source as gguf
    from forerun.models.loading.gguf.file import GgufTensor
    from forerun.models.loading.gguf.source import GgufSource
else:
    folder_source = DeferredModule("forerun.models.loading.folder_source")
    gguf = DeferredModule("forerun.models.loading.gguf.source")

Quantization = str
"""A name of QUANTISATIONS, or UNQUANTIZED."""


class ModelSource(ABC):
    """The files of one model. Each is read when a method needs it.

    Each method raises ModelLoadError where its part is missing, damaged or contradicts another, and
    UnsupportedModelError where it is of a kind that forerun does not serve.

    Attributes:
        name: the name that the user gave, for messages.
        place_of_sampling: where `recommended_sampling` is written, for messages.
        computed_types: of `block_types`, those that the native fused decoder computes with as they lie.
    """

    name: str
    place_of_sampling: str
    computed_types: Collection[str] = BLOCK_TYPES

    @abstractmethod
    def config(self) -> Any:
        """Return the Transformers configuration of its language model."""

    def plain_config(self) -> Any:
        """Return what `config` does, or a `PlainConfig` of the same values."""
        return self.config()

    @abstractmethod
    def eos_token_ids(self, config: Any) -> frozenset[int]:
        """Return the tokens that end an output; ids that are no token are left out."""

    @abstractmethod
    def checkpoint(self, config: Any, dtype: torch.dtype, spec: DecoderSpec | None = None) -> Checkpoint:
        """Return the tensors by the names that Transformers gives them, not read yet.

        Args:
            dtype: that they will be brought to. Tensors that are computed when they are read come in it.
            spec: of the configuration; None: it is made where names depend on it.
        """

    @abstractmethod
    def stored_dtype(self) -> str | None:
        """Return the dtype of most of the weights, such as "bfloat16"; None if they are quantized."""

    @abstractmethod
    def recommended_sampling(self) -> dict[str, float]:
        """Return the sampling options that the files recommend, if they would change the result of a request without
        options."""

    def published_name(self) -> str:
        """Return what the files say of the model's name, if they should say something of sampling and do not."""
        return ""

    @abstractmethod
    def has_tokenizer(self) -> bool:
        """Return whether there are any files of a tokenizer."""

    @abstractmethod
    def tokenizer(self) -> Any:
        """Return the Transformers tokenizer."""

    def token_texts(self) -> list[str] | None:
        """Return the tokens by id as a list in the files has them, so that files are compared without a tokenizer; None
        if none has."""
        return None

    def output_tokens(self, config: Any) -> tuple[int, ...] | None:
        """Return the tokens that the output layer was trained to propose, rising; None for all of the vocabulary."""
        return None

    def mask_token(self, config: Any) -> int | None:
        """Return the token that stands for one that is not known yet; None if the model drafts token by token."""
        return None

    def quantization(self) -> Quantization | None:
        """Return the quantization that the weights were saved in for forerun; None if the user chooses it."""
        return None

    def quantized_weight(self, spec: DecoderSpec | None) -> Callable[[str], QuantizedWeight | None]:
        """Return a function that returns a quantized weight of the files by Transformers' name, with rows in
        Transformers' order, or None if none can be served as stored."""
        return lambda name: None

    def quantized_format(self, spec: DecoderSpec | None) -> Callable[[str], QuantizedFormat | None]:
        """Return a function that returns the format of a weight of `quantized_weight` by name; no numbers are read."""
        return lambda name: None

    def blocks(self, spec: DecoderSpec) -> Callable[[str], BlockWeight | QuantizedWeight | None]:
        """Return a function that returns a matrix of the files in GGUF's blocks, or in the integers of another program,
        by Transformers' name, with rows in Transformers' order, or None for other tensors. They are read when they are
        used."""
        return lambda name: None

    def block_form(self, spec: DecoderSpec) -> Callable[[str], QuantizedFormat | BlockType | None]:
        """Return a function that returns the forms of `blocks` by name; no numbers are read."""
        return lambda name: None

    def block_types(self) -> Mapping[str, int]:
        """Return how many tensors of the files there are of each of GGUF's quantized types, or of another program's."""
        return {}

    def file_type(self) -> str | None:
        """Return the name of the type in which the files have their weights, such as "Q4_K_M"; None if no
        weight is in blocks or integers that can be computed with as they lie."""
        return None

    def stored_nbytes(self) -> int | None:
        """Return the bytes that the files have the weights in; None if these are not all on this machine."""
        return None

    def finish(self) -> None:  # noqa: B027 (most have nothing to do)
        """Check, when all weights have been read, that the files were not changed meanwhile."""

    def packed_weights(self, spec: DecoderSpec | None) -> Mapping[str, GgufTensor]:
        """Return the packed tensors of the file, by Transformers' names and with rows in Transformers' order; empty if
        weights are not packed."""
        return MappingProxyType({})


_HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+):([^:]+)")


def find_source(name: str | Path) -> ModelSource:
    """Return the source of a model.

    Args:
        name: "smollm2" or another model that `forerun fetch` brings; a bundled model; a GGUF file or any part of one,
            whatever it is called; a folder with one GGUF model and no safetensors; a Transformers folder; for a string,
            also a hub id, or one of its GGUF models ("owner/name:file.gguf", "owner/name:Q4_K_M"), or what
            `forerun models` calls a model of another program's ("qwen3:4b").

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
    is_name = not isinstance(name, Path) and text not in BUNDLED_MODELS and not path.exists()
    if is_name and (stored := find_stored(text)) is not None:
        return _of_file(text, stored)
    on_hub = _HUB_FILE.fullmatch(text) if is_name else None
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
        return folder_source.FolderSource(folder)  # what a cache happens to hold decides nothing
    files = gguf_models(folder.path.iterdir())
    return _of_file(text, _only(files, f"model folder {name}")) if files else folder_source.FolderSource(folder)


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
