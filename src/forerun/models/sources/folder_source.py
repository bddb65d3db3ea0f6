"""A Transformers folder, or the hub's cache of one, as a model's source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from forerun.errors import ModelLoadError
from forerun.files.foreign_errors import REMEDY, as_load_errors
from forerun.kernels.quantised_weight import CodeForm, QuantisedWeight
from forerun.models.code_tensors import CodeTensors
from forerun.models.quantising import Quantisation
from forerun.models.sources.base import ModelSource
from forerun.models.sources.folder import CONFIG, GENERATION_CONFIG, ModelFolder
from forerun.models.sources.folder_configuration import (
    asks_for_code,
    eos_token_ids,
    output_tokens,
    read_config,
    recommended_sampling,
    stored_quantisation,
)
from forerun.models.transformers_model import read_tokenizer
from forerun.models.weights import Checkpoint, TensorSlice


class FolderSource(ModelSource):
    """config.json, safetensors and tokenizer of a folder. None of its code is run."""

    place_of_sampling = GENERATION_CONFIG

    def __init__(self, folder: ModelFolder) -> None:
        self.name, self.folder = folder.name, folder

    def config(self) -> Any:
        """As `ModelSource.config`."""
        return read_config(self.folder)

    def eos_token_ids(self, config: Any) -> frozenset[int]:
        """As `ModelSource.eos_token_ids`."""
        return eos_token_ids(self.folder, config)

    def checkpoint(self, config: Any, dtype: torch.dtype) -> Checkpoint:
        """As `ModelSource.checkpoint`; tensors come in the format they are stored in."""
        checkpoint = _open(self.folder.weight_files())
        if self.quantisation() is None:
            return checkpoint
        codes, others = CodeTensors.sort(checkpoint.slices, self.name)
        return replace(checkpoint, slices={**others, **dict(codes.slices(dtype))})

    def stored_dtype(self) -> str | None:
        """As `ModelSource.stored_dtype`."""
        return _open(self.folder.weight_files()).stored_dtype() if self.quantisation() is None else None

    def quantisation(self) -> Quantisation | None:
        """As `ModelSource.quantisation`."""
        return stored_quantisation(self.folder.config())

    def quantised_weight(self, config: Any) -> Callable[[str], QuantisedWeight | None]:
        """As `ModelSource.quantised_weight`."""
        if self.quantisation() is None:
            return super().quantised_weight(config)
        return self._codes().read

    def code_form(self, config: Any) -> Callable[[str], CodeForm | None]:
        """As `ModelSource.code_form`."""
        return super().code_form(config) if self.quantisation() is None else self._codes().form

    def _codes(self) -> CodeTensors:
        return CodeTensors.sort(_open(self.folder.weight_files()).slices, self.name)[0]

    def recommended_sampling(self) -> dict[str, float]:
        """As `ModelSource.recommended_sampling`."""
        return recommended_sampling(self.folder)

    def output_tokens(self, config: Any) -> tuple[int, ...] | None:
        """As `ModelSource.output_tokens`."""
        return output_tokens(self.folder.config(), config)

    def has_tokenizer(self) -> bool:
        """As `ModelSource.has_tokenizer`."""
        return self.folder.has_tokenizer()

    def tokenizer(self) -> Any:
        """As `ModelSource.tokenizer`; one that needs code of the folder's is refused."""
        remedy = "Put tokenizer.json and tokenizer_config.json beside the weights, or pass token ids."
        if not self.has_tokenizer():
            raise ModelLoadError(f"no tokenizer could be read from {self.name}: there is none. {remedy}")
        settings = self.folder.tokenizer_config()
        try:
            return read_tokenizer(self.folder.path, self.name, remedy)
        except ModelLoadError as error:
            code = asks_for_code(settings)
            if code is None or "trust_remote_code" not in str(error.__cause__):
                raise
            raise ModelLoadError(
                f"{settings.place}: the code that auto_map asks for ({code}) is not run: it could do anything. {remedy}"
            ) from None


def _open(files: Sequence[Path]) -> Checkpoint:
    """The tensors of safetensors files, at least one.

    Raises:
        ModelLoadError: a file is damaged, or two files have a tensor of the same name.
    """
    from safetensors import safe_open

    slices: dict[str, TensorSlice] = {}
    for file in files:
        with as_load_errors(f"{file}: the weights are damaged", REMEDY):
            opened: Any = safe_open(file, framework="pt")
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                if name in slices:
                    raise ModelLoadError(f"{file}: tensor {name} is in another file as well. {REMEDY}")
                slices[name] = opened.get_slice(name)
    if not slices:
        raise ModelLoadError(f"{files[0]}: it holds no tensors. {REMEDY}")
    return Checkpoint(slices, CONFIG, f"Give the {CONFIG} that the weights were saved with.")
