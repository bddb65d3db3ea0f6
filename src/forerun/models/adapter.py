"""PEFT's LoRA adapters (Hu et al., 2106.09685): read, compared with the model that they are for, and merged into it.

The folder is read here: its settings as JSON, its tensors from safetensors. PEFT is given values alone, so it opens no
file, looks up no base model, and imports nothing that a setting names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forerun.errors import ConfigError, ModelLoadError, UnsupportedModelError
from forerun.files.foreign_errors import as_load_errors
from forerun.files.json_file import Fields
from forerun.models.adapter_folder import (
    CONFIG,
    MERGED,
    REMEDY,
    Tensors,
    check_targets,
    read_settings,
    read_tensors,
    sorted_tensors,
)
from forerun.models.sources.folder import ModelFolder, local_path
from forerun.models.sources.folder_source import FolderSource
from forerun.models.transformers_model import rounded
from forerun.vocabulary.compare import first_difference, shown
from forerun.vocabulary.tokenizer import tokens_by_id

INSTALL = "pip install 'forerun[peft]'"


def with_adapter(
    read: Callable[[torch.dtype], Any], dtype: torch.dtype, adapter: str | Path | None, name: str | Path
) -> Any:
    """The Transformers model that `read` gives in a number format, with an adapter merged.

    The sum is made in float32 (float64 for a float64 model) and rounded once, so the whole model is held in that format
    meanwhile.

    Args:
        adapter: its folder; None: the model as it is.
        name: the model's, for messages.

    Raises:
        ConfigError: PEFT is not installed.
        ModelLoadError: the adapter is damaged, or does not fit the model.
        UnsupportedModelError: it is no LoRA adapter, or one that changes more than LoRA's matrices.
    """
    if adapter is None:
        return read(dtype)
    found = Adapter.read(adapter)
    _peft()
    model = found.merged(read(torch.promote_types(dtype, torch.float32)), str(name))
    return rounded(model, dtype)


def adapter_tokenizer(folder: str | Path, base: Any, name: str) -> Any:
    """The tokenizer that was saved with an adapter; without one, the model's.

    Args:
        base: the model's; None if it has none. name: the model's, for messages.

    Raises:
        ModelLoadError: it cannot be read, or a token id stands for something else than in the model's.
    """
    source = FolderSource(ModelFolder(f"adapter {folder}", local_path(folder)))
    if not source.has_tokenizer():
        return base
    tokenizer = source.tokenizer()
    first = None if base is None else first_difference(tokens_by_id(base), tokens_by_id(tokenizer))
    if first is not None:
        token_id, ours, theirs = first
        raise ModelLoadError(
            f"adapter {folder}: token {token_id} of the tokenizer beside it is {shown(theirs)}, and {shown(ours)} in "
            f"the vocabulary of {name}. Give the model that it was trained on; if the ids that the adapter was "
            "trained with are the model's, take the tokenizer out of its folder."
        )
    return tokenizer


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter in a folder.

    Attributes:
        path: the folder.
        settings: what of adapter_config.json decides the merged weights.
        tensors: its matrices, and what else its file holds.
    """

    path: Path
    settings: Mapping[str, Any]
    tensors: Tensors

    @classmethod
    def read(cls, folder: str | Path) -> Adapter:
        """The adapter in a folder of this machine.

        Raises:
            ModelLoadError, UnsupportedModelError: as `with_adapter`, as far as it can be told without the model.
        """
        path = local_path(folder)
        if not (path / CONFIG).is_file():
            raise ModelLoadError(
                f"adapter {folder}: it is no folder with {CONFIG}. Give the folder that PEFT's save_pretrained wrote; "
                "adapters are not fetched."
            )
        fields = Fields.read(path / CONFIG, ModelLoadError, remedy=REMEDY)
        settings = read_settings(fields)
        tensors = sorted_tensors(read_tensors(path), path)
        check_targets(fields, tensors.parts)
        return cls(path, settings, tensors)

    def merged(self, model: Any, name: str) -> Any:
        """The Transformers model with this added to its weights.

        Raises:
            ModelLoadError: a module is not there or has another shape, a tensor is missing, or a number is not finite.
        """
        self._check_modules(model, name)
        peft = _peft()
        config = peft.LoraConfig(**self.settings, target_modules=list(self.tensors.parts))
        what = f"adapter {self.path} cannot be merged into {name}"
        with as_load_errors(what, REMEDY), warnings.catch_warnings(), torch.random.fork_rng([]):
            warnings.simplefilter("ignore")
            wrapped = peft.get_peft_model(model, config)
            loaded = peft.set_peft_model_state_dict(wrapped, dict(self.tensors.matrices))
            missing = [key for key in loaded.missing_keys if "lora_" in key]
            if missing or loaded.unexpected_keys:
                wrong = f"it lacks {missing[0]}" if missing else f"it holds {loaded.unexpected_keys[0]}"
                raise ModelLoadError(f"{what}: {wrong}. {REMEDY}")
            result = wrapped.merge_and_unload(safe_merge=True)
        result.requires_grad_(False)
        return result.eval()

    def _check_modules(self, model: Any, name: str) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        shared = _shared_weights(modules)
        for module, weight in self.tensors.whole.items():
            served = getattr(modules.get(module), "weight", None)
            if served is None or served.shape != weight.shape or not served.to(weight.dtype).equal(weight):
                raise UnsupportedModelError(
                    f"adapter {self.path}: it holds the whole weight of {module}, and {name} has another one: it was "
                    f"trained, or tokens were added. {MERGED}"
                )
        for module, parts in self.tensors.parts.items():
            found = modules.get(module)
            if not isinstance(getattr(found, "weight", None), Tensor):
                raise ModelLoadError(
                    f"adapter {self.path}: it is for a module {module}, which {name} does not have. Give the model "
                    "that the adapter was trained on."
                )
            if module in shared:
                raise UnsupportedModelError(
                    f"adapter {self.path}: it changes {module}, whose weight {name} shares with {shared[module]}: "
                    f"merged, it would change both. {MERGED}"
                )
            _check_shapes(self.path, module, parts, found, name)


def _check_shapes(path: Path, module: str, parts: Mapping[str, Tensor], found: Any, name: str) -> None:
    from transformers.pytorch_utils import Conv1D

    weight = list(found.weight.shape)
    if len(weight) != 2:
        raise ModelLoadError(f"adapter {path}: {module} of {name} is no linear layer or embedding. {REMEDY}")
    inner = isinstance(found, nn.Embedding)
    down, up = ("lora_embedding_A", "lora_embedding_B") if inner else ("lora_A.weight", "lora_B.weight")
    for part in (down, up):
        if part not in parts:
            raise ModelLoadError(f"adapter {path}: {module} has no {part}. {REMEDY}")
    first, last = list(parts[down].shape), list(parts[up].shape)
    size_in, size_out = weight if inner or isinstance(found, Conv1D) else weight[::-1]
    if len(first) != 2 or len(last) != 2 or first[1] != size_in or last != [size_out, first[0]]:
        raise ModelLoadError(
            f"adapter {path}: its matrices for {module} have shapes {first} and {last}, and the weight in {name} has "
            f"{weight}. Give the model that the adapter was trained on."
        )


def _shared_weights(modules: Mapping[str, Any]) -> dict[str, str]:
    """Module -> another one with the same weight, as a tied embedding and output layer."""
    owners: dict[int, list[str]] = {}
    for path, module in modules.items():
        weight = module._parameters.get("weight")
        if weight is not None:
            owners.setdefault(id(weight), []).append(path)
    return {
        path: next(other for other in paths if other != path)
        for paths in owners.values()
        if len(paths) > 1
        for path in paths
    }


def _peft() -> Any:
    """The package. Raises ConfigError where it is not there."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"An adapter needs the package peft, which cannot be imported: {error}. {INSTALL}") from None
    return peft
