"""The interface of a model's source, whatever kind of files it lies in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from forerun.kernels.block_weight import BLOCK_TYPES, BlockType, BlockWeight
from forerun.kernels.quantize import QuantizedFormat, QuantizedWeight
from forerun.models.loading.weights import Checkpoint
from forerun.models.spec.decoder import DecoderSpec

if TYPE_CHECKING:
    from forerun.models.loading.gguf.file import GgufTensor

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

    @abstractmethod
    def has_tokenizer(self) -> bool:
        """Return whether there are any files of a tokenizer."""

    @abstractmethod
    def tokenizer(self) -> Any:
        """Return the Transformers tokenizer."""

    def output_tokens(self, config: Any) -> tuple[int, ...] | None:
        """Return the tokens that the output layer was trained to propose, rising; None for all of the vocabulary."""
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

    def finish(self) -> None:  # noqa: B027 (most have nothing to do)
        """Check, when all weights have been read, that the files were not changed meanwhile."""

    def packed_weights(self, spec: DecoderSpec | None) -> Mapping[str, GgufTensor]:
        """Return the packed tensors of the file, by Transformers' names and with rows in Transformers' order; empty if
        weights are not packed."""
        return MappingProxyType({})
