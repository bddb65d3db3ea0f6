"""The interface between the engine and the models: rows in, logits and hidden states out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.config import REFERENCE
from forerun.errors import ConfigError, UnsupportedModelError
from forerun.kernels.cpu.linear import NativeLinear
from forerun.models.attention.base import Layout, Planner
from forerun.types import Cache, Pool

if TYPE_CHECKING:
    from forerun.models.draft_session import DraftSession, Pick

# Hidden states of chosen layers, returned beside the logits.


class HiddenStateOutputs:
    """The states that enter chosen layers, residual included, of the requested rows.

    Args:
        layers: rising; as many as the model has layers stands for the state after the final norm.
    """

    def __init__(self, layers: Sequence[int], layout: Layout) -> None:
        self.layers = layers
        self._layout = layout
        self._states: list[Tensor] = []

    def take(self, layer: int, states: Tensor, norm: Callable[[Tensor], Tensor] | None = None) -> None:
        """Store what enters a layer, if it was chosen. Layers come in rising order.

        Args:
            states: [T, H], all rows.
            norm: applied to the requested rows; None: the states are stored as they are.
        """
        if layer in self.layers:
            requested = self._layout.select_hidden_rows(states)
            self._states.append((requested.clone() if norm is None else norm(requested))[:, None])

    def add(self, states: Tensor) -> None:
        """Store what enters the next of the chosen layers, [T, layers, H], all rows, which is not changed again."""
        if states.shape[1]:
            self._states.append(self._layout.select_hidden_rows(states))

    def stacked(self) -> Tensor | None:
        """Return the states, [T, layers, H], or None if no layer was chosen."""
        if len(self._states) == 1:
            return self._states[0]
        return torch.cat(self._states, 1) if self._states else None


def check_layers(layers: Sequence[int], num_layers: int, first: int = 0) -> None:
    """Raise an error for layers, one at least, whose states cannot be returned.

    Args:
        first: layer that rows go on from.

    Raises:
        ConfigError: a layer is out of range, or they do not rise.
        ValueError: a layer lies before `first`, so that what entered it is gone.
    """
    if min(layers) < 0 or max(layers) > num_layers or any(a >= b for a, b in pairwise(layers)):
        raise ConfigError(
            f"hidden states of layers {list(layers)} were requested, but they must rise and lie in 0..{num_layers}, "
            f"where {num_layers} stands for the state after the final norm. Request others."
        )
    if min(layers) < first:
        raise ValueError(
            f"hidden states of layer {min(layers)} were requested, but rows go on from layer {first}: what entered "
            "the layers before it is gone. Compute these rows from the first layer."
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """The new rows of one sequence in one forward.

    Attributes:
        cache: the sequence's cache in this model.
        token_ids: [n], at least one; a list, or an int64 tensor on the model's device.
        parents: [n], the row that each row follows, among the rows fed since the cache's last commit, these included
            (they count on from `cache.num_scratch`); -1 for the committed prefix. None: the first follows the last
            row fed, each other the row before it.
        num_logits: logits are returned for this many of the last rows; None for all.
        num_hidden_outputs: hidden states are returned for this many of the last rows, whose logits need not be
            computed for that; None: for those whose logits are returned.
        states: [n, S], what a draft head reads beside the tokens (`drafters/models/eagle/model.py`); None for other
            models.
        is_block: the rows see each other and everything fed before them (`drafters/models/block/model.py`); otherwise
            each sees itself and the rows it follows.
        hidden: [n, hidden], what enters layer `first_layer` for each of the rows, as `forward_first` returned it.
            These rows are the last ones fed, not new ones: keys and values of the layers before lie in their slots.
            None: nothing is computed yet.
        first_layer: the layer to go on from.
    """

    cache: Cache
    token_ids: Sequence[int] | Tensor
    parents: Sequence[int] | None = None
    num_logits: int | None = None
    hidden: Tensor | None = None
    first_layer: int = 0
    num_hidden_outputs: int | None = None
    states: Tensor | None = None
    is_block: bool = False

    @property
    def num_wanted(self) -> int:
        """Return the number of rows whose logits are returned."""
        return len(self.token_ids) if self.num_logits is None else self.num_logits

    @property
    def num_hidden_rows(self) -> int:
        """Return the number of rows whose hidden states are returned, if any are."""
        return self.num_wanted if self.num_hidden_outputs is None else self.num_hidden_outputs


@dataclass(frozen=True, slots=True)
class Forward:
    """The result of a forward.

    Attributes:
        logits: [R, V] of the requested rows in packed order; float32, or float64 for a float64 model.
        hidden_outputs: [T, layers, H] hidden states entering the requested layers, residual included, of the rows that
            `Rows.num_hidden_outputs` selects, in packed order and in the decoder's own dtype; None if no layer was
            requested.
        num_experts: experts of all layers that rows were given to, each once, where the native kernels compute a
            mixture.
    """

    logits: Tensor
    hidden_outputs: Tensor | None = None
    num_experts: int = 0


@dataclass(frozen=True, slots=True)
class Exactness:
    """Whether a row's result is bit-identical alone and beside others, as tested at load.

    Attributes:
        exact: it was, in every trial.
        reason: what prevents it, with the module's name; None when exact.
        tried: what the self-test has computed: layers, outputs, rows and seconds, and whether that was in an earlier
            load; empty where it has not run.
    """

    exact: bool
    reason: str | None = None
    tried: str = ""

    def __str__(self) -> str:
        """Return the verdict in words."""
        if not self.exact:
            return f"not exact: {self.reason}"
        return f"exact ({self.tried})" if self.tried else "exact"


@dataclass(eq=False, repr=False)
class LanguageModel(ABC):
    """A target, a draft model, or a stand-in for one.

    Attributes:
        name: what messages call it, the name that it was loaded by unless `loaded_by` is another.
        vocab_size: width of the logits.
        context_length: positions that a sequence may have: fewer than `full_context_length` where memory holds fewer.
        eos_token_ids: tokens that end its output.
        dtype: of the weights.
        device: where it computes.
        num_parameters: of its weights.
        exactness: the result of the self-test.
        recommended_sampling: options of sampling that its files recommend, by the names of `SamplingParams`.
        published_name: what its files say of its name, if they say nothing of sampling; else empty.
        architecture: the `model_type` of its configuration; empty where that is unknown.
        loaded_by: the name that it was loaded by, where it is served under another; else empty.
        adapter: the folder of the adapter that was merged into its weights; None without one.
        quantize: the quantization of its weights, "int8" or "int4"; None for numbers of `dtype`.
        kv_cache_dtype: the number format of keys and values where it was chosen; None: that of the kernels.
        kernels: the kernels that compute it: "reference", "triton", or "native" with the instruction set.
        state_nbytes: bytes that a sequence takes besides its pages, in recurrent layers.
        full_context_length: positions it can compute, or that the user allows.
        mask_token: what it reads in place of tokens that are not known yet, if it was tuned to draft several at once.
        output_tokens: int64, rising, the tokens that it was trained to propose; None: all.
    """

    name: str
    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device
    num_parameters: int
    exactness: Exactness
    recommended_sampling = MappingProxyType[str, float]({})  # of the class: it is no field
    published_name = ""  # likewise
    architecture = ""  # likewise
    loaded_by = ""  # likewise
    adapter: str | None = None
    quantize: str | None = None
    kv_cache_dtype: str | None = None
    kernels: str = REFERENCE
    state_nbytes: int = 0
    full_context_length: int = 0
    mask_token: int | None = None
    output_tokens: Tensor | None = None

    def __post_init__(self) -> None:
        self.full_context_length = self.full_context_length or self.context_length

    @property
    def context_reason(self) -> str:
        """Return why a sequence may have fewer positions than the model computes; empty if it may not."""
        return context_reason(self.context_length, self.full_context_length)

    @property
    def pool(self) -> Pool | None:
        """Return the pool of its caches' pages; None if they are not bounded."""
        return None

    @abstractmethod
    def new_cache(self) -> Cache:
        """Return an empty cache for one sequence."""

    @abstractmethod
    def forward(self, batch: Sequence[Rows], layers: Sequence[int] = ()) -> Forward:
        """Compute the rows of several sequences. They join their caches' scratch: `commit` decides what stays.

        Args:
            batch: at least one Rows.
            layers: whose entering states to return, rising; the number of layers stands for the state after the final
                norm.
        """

    def draft_session(self, caches: Sequence[Cache], pick: Pick) -> DraftSession | None:
        """Return a session that computes chains row by row, with less preparation for each row than `forward`.

        Args:
            caches: one a sequence, without scratch.
            pick: what to compute from the logits.

        Returns:
            None if the model has no such session.
        """
        return None

    def of_outputs(self, blocks: NDArray[np.int32]) -> LanguageModel | None:
        """Return the same model, on the same memory and pool, whose logits are those of some tokens alone.

        Args:
            blocks: of 16 tokens each in the order of `output_order`, rising; the last may be one of fewer. The array
                must not change.

        Returns:
            None if this model computes the logits of all tokens, or of none but its own choice.
        """
        return None

    def experts_given(self) -> NDArray[np.int64] | None:
        """Return [experts of all layers] the rows that each was given so far; None where nobody counts them."""
        return None

    def fingerprint(self) -> str | None:
        """Return a hash of all that decides the bits of keys, values and states: weights as memory has them, shapes,
        number formats, the build and the instruction set of the kernels, the processor. All weights are read: a second
        for two gigabytes.

        Returns:
            None if this model does not tell.
        """
        return None

    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        """Return rows of the embedding table, dequantized if necessary.

        Args:
            token_ids: [n] int64.

        Returns:
            [n, H] float32.

        Raises:
            UnsupportedModelError: the model has no such table.
        """
        raise UnsupportedModelError(f"{self.name} has no embeddings that can be read.")

    def output_rows(self, token_ids: Tensor) -> Tensor:
        """Return rows of the output layer's weight, whose product with the state after the final norm gives the logits.
        Arguments and errors are those of `embedding_rows`."""
        raise UnsupportedModelError(f"{self.name} has no output layer that can be read.")

    @property
    def output_layer(self) -> NativeLinear | None:
        """Return the output layer that a head can compute with in place of a copy of `output_rows`; None: there is
        none."""
        return None


class StandIn(LanguageModel):
    """Base class of models that wrap another one: copies its attributes, and uses its caches unless overridden.

    Attributes:
        model: that one.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(
            name=model.name,
            vocab_size=model.vocab_size,
            context_length=model.context_length,
            eos_token_ids=model.eos_token_ids,
            dtype=model.dtype,
            device=model.device,
            num_parameters=model.num_parameters,
            exactness=model.exactness,
            adapter=model.adapter,
            quantize=model.quantize,
            kv_cache_dtype=model.kv_cache_dtype,
            kernels=model.kernels,
            state_nbytes=model.state_nbytes,
            mask_token=model.mask_token,
        )
        self.model = model

    @property
    def pool(self) -> Pool | None:
        """Return the pool of the wrapped model's caches."""
        return self.model.pool

    def new_cache(self) -> Cache:
        """Return an empty cache for one sequence."""
        return self.model.new_cache()

    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        """Return rows of the embedding table, dequantized if necessary (`LanguageModel.embedding_rows`)."""
        return self.model.embedding_rows(token_ids)

    def output_rows(self, token_ids: Tensor) -> Tensor:
        """Return rows of the output layer's weight, whose product with the state after the final norm gives the logits
        (`LanguageModel.output_rows`)."""
        return self.model.output_rows(token_ids)

    @property
    def output_layer(self) -> NativeLinear | None:
        """Return the output layer that a head can compute with (`LanguageModel.output_layer`)."""
        return self.model.output_layer


def output_order(output_tokens: Tensor, vocab_size: int) -> Tensor:
    """Return [vocab_size] int64, all tokens in the order of a model's outputs that was trained to propose some: these
    first, then the others, rising."""
    is_other = torch.ones(vocab_size, dtype=torch.bool)
    is_other[output_tokens] = False
    return torch.cat([output_tokens, is_other.nonzero()[:, 0]])


def context_reason(held: int, full: int) -> str:
    """Return why a sequence may have `held` positions of `full`; empty if it may have all."""
    return f"memory; the model's own {full:,}" if held < full else ""


def number_format(model: LanguageModel) -> str:
    """Return the number format of the weights in a word: "bfloat16", "int8"."""
    return model.quantize or str(model.dtype).removeprefix("torch.")


def identity(model: LanguageModel) -> str:
    """Return the key of a model in stored costs: name, adapter, size, number formats, device, kernels."""
    loaded_by = model.loaded_by or model.name
    name = loaded_by if model.adapter is None else f"{loaded_by} with {model.adapter}"
    bits = "" if model.quantize is None else f" {model.quantize}"
    stored = "" if model.kv_cache_dtype is None else f" {model.kv_cache_dtype} keys"
    return f"{name} {model.num_parameters} {model.dtype}{bits}{stored} {model.device} {model.kernels}"


class LayerRangeDecoder(ABC):
    """A decoder whose layers can be computed in parts, for early exit and for resuming from a layer.

    Attributes:
        num_layers: layers, each with keys and values that belong to it alone.
        planner: what prepares its forwards, and makes their caches.
    """

    num_layers: int
    planner: Planner

    def forward(self, layout: Layout, layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Return logits of the requested rows, [R, V] with R >= layout.num_logits, and the states that enter `layers`
        (`Decoder.forward`)."""
        hidden_outputs = HiddenStateOutputs(layers, layout)
        logits = self.head(
            self.forward_layers(self.embed(layout), layout, 0, self.num_layers, hidden_outputs), layout, hidden_outputs
        )
        return logits, hidden_outputs.stacked()

    @property
    def num_experts_read(self) -> int:
        """Return the experts that all forwards together have read; 0: only the native decoder counts them."""
        return 0

    def fingerprint(self) -> str | None:
        """Return None: only the native decoder tells what decides its bits (`LanguageModel.fingerprint`)."""
        return None

    def experts_given(self) -> NDArray[np.int64] | None:
        """Return what `LanguageModel.experts_given` does."""
        return None

    def draft_session(self, caches: Sequence[Cache], pick: Pick) -> DraftSession | None:
        """Return None: these decoders have no draft session (`LanguageModel.draft_session`)."""
        return None

    def of_outputs(self, blocks: NDArray[np.int32]) -> LayerRangeDecoder | None:
        """Return None: these decoders compute all outputs (`LanguageModel.of_outputs`)."""
        return None

    @abstractmethod
    def embed(self, layout: Layout) -> Tensor:
        """Return what enters the first layer, [T, hidden]."""

    @abstractmethod
    def forward_layers(
        self, x: Tensor, layout: Layout, first: int, last: int, hidden_outputs: HiddenStateOutputs
    ) -> Tensor:
        """Compute layers `first` to `last` - 1: [T, hidden] -> [T, hidden]."""

    @abstractmethod
    def head(self, x: Tensor, layout: Layout, hidden_outputs: HiddenStateOutputs) -> Tensor:
        """Return the logits of the requested rows, [R, V], from the output of the last layer or, to exit early, any
        other."""

    @abstractmethod
    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        """Return rows of the embedding table, [n, hidden] float32 (`Decoder.embedding_rows`)."""

    @abstractmethod
    def output_rows(self, token_ids: Tensor) -> Tensor:
        """Return rows of the output layer's weight, [n, hidden] float32 (`Decoder.output_rows`)."""
