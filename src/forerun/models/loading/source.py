"""The contract of a model's source: all that loading needs to know, whatever kind of files it lies in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from forerun.kernels.quantisation import CodeForm, QuantisedWeight
from forerun.models.loading.gguf.file import GgufTensor
from forerun.models.loading.quantise import Quantisation
from forerun.models.loading.weights import Checkpoint


class ModelSource(ABC):
    """The files of one model. They are read when a method asks for what is in them.

    Each method raises ModelLoadError where its part is missing, damaged or contradicts another, and
    UnsupportedModelError where it is of a kind that forerun does not serve.

    Attributes:
        name: what the model was asked for as, for messages.
        place_of_sampling: where `recommended_sampling` is written, for messages.
    """

    name: str
    place_of_sampling: str

    @abstractmethod
    def config(self) -> Any:
        """The Transformers configuration of its language model."""

    @abstractmethod
    def eos_token_ids(self, config: Any) -> frozenset[int]:
        """The tokens that end an output; ids that are no token are left out."""

    @abstractmethod
    def checkpoint(self, config: Any, dtype: torch.dtype) -> Checkpoint:
        """The tensors by the names that Transformers gives them, not read yet.

        Args:
            dtype: that they will be brought to. Tensors that are computed when they are read come in it.
        """

    @abstractmethod
    def stored_dtype(self) -> str | None:
        """The number format of most of the weights, such as "bfloat16"; None where they are quantised."""

    @abstractmethod
    def recommended_sampling(self) -> dict[str, float]:
        """The sampling options that the files recommend, where they would change what a request without options
        gives."""

    @abstractmethod
    def has_tokenizer(self) -> bool:
        """Whether there is anything that a tokenizer would be made of."""

    @abstractmethod
    def tokenizer(self) -> Any:
        """The Transformers tokenizer."""

    def output_tokens(self, config: Any) -> tuple[int, ...] | None:
        """The tokens that the output layer was trained to propose, rising; None for all of the vocabulary."""
        return None

    def quantisation(self) -> Quantisation | None:
        """What the weights were saved in for forerun to serve them so; None where that is for the user to say."""
        return None

    def quantised_weight(self, config: Any) -> Callable[[str], QuantisedWeight | None]:
        """What gives a weight in the codes that the files have it in, by Transformers' name and with rows in
        Transformers' order; None where they have none that are served as they are."""
        return lambda name: None

    def code_form(self, config: Any) -> Callable[[str], CodeForm | None]:
        """The form of what `quantised_weight` gives by a name; no numbers are read."""
        return lambda name: None

    def packed_weights(self, config: Any) -> Mapping[str, GgufTensor]:
        """The tensors as they are packed in the file, by Transformers' names and with rows in Transformers' order;
        nothing where weights are not packed."""
        return MappingProxyType({})
