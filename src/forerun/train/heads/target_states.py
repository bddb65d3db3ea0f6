"""The target as training reads it: hidden states of many documents at once, embeddings and output rows.

The states of a document need not have the same bits in every batch, so that products may take the fastest shapes:
Transformers' modules compute all documents as one row, and attention is computed document by document. `check_states`
compares these states with those of the inference target before a run.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from forerun.errors import ConfigError, UnsupportedModelError
from forerun.models import LanguageModel, Rows, load_transformers_model
from forerun.train.accelerator import SHAPE_STEP, columns_of
from forerun.train.data.packed import NO_DOCUMENT
from forerun.train.heads.module import Augmentation, HeadRows
from forerun.utils.files import digest, remove, write_bytes

NAME = "forerun_documents"
MAX_DIFFERENCE = 0.1
"""Largest root-mean-square difference of a layer's states, over their size, between training and inference.
bfloat16 gives about 0.01; states of another layer differ by more than their size."""
CHECKED_TOKENS = 128
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments of attention that change its scores and are not computed here."""
_CACHED = "states"


class TargetStates:
    """Computes the states that enter chosen layers.

    Args:
        model: the target as Transformers computes it, in evaluation mode.
        layers: rising; the number of its layers stands for the state after the final norm.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        if model.config._attn_implementation != NAME:
            AttentionInterface.register(NAME, _attend_by_document)
            model.set_attn_implementation(NAME)
        self.layers = tuple(layers)
        self._decoder: Any = model.get_decoder()

    def replica(self) -> TargetStates:
        """Return a copy that shares the weights, for another thread."""
        other = copy.copy(self)
        memo: dict[int, Any] = {id(each): each for each in (*self._decoder.parameters(), *self._decoder.buffers())}
        other._decoder = copy.deepcopy(self._decoder, memo)
        return other

    @torch.no_grad()
    def of(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Compute the states [N, layers, H], bfloat16, of documents laid one after another. token_ids: [N] int64."""
        where = next(self._decoder.parameters()).device
        count = len(token_ids)
        if count % SHAPE_STEP:  # one more document, whose states are dropped
            lengths = [*lengths, -count % SHAPE_STEP]
            token_ids = F.pad(token_ids, (0, lengths[-1]))
        positions = torch.cat([torch.arange(length) for length in lengths])
        found = self._decoder(
            input_ids=token_ids[None].to(where),
            position_ids=positions[None].to(where),
            use_cache=False,
            output_hidden_states=True,
            document_lengths=tuple(lengths),
        ).hidden_states
        return torch.stack([found[layer][0, :count] for layer in self.layers], 1).bfloat16()


def _attend_by_document(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    document_lengths: Sequence[int] = (),
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as Transformers calls it. query: [1, heads, N, D]; the mask is not read."""
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"attention with {name} cannot be trained for. Choose another target.")
    queries, keys, values = (torch.split(part, list(document_lengths), 2) for part in (query, key, value))
    attended = [
        _attend(*document, scaling=scaling, window=sliding_window)
        for document in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(attended, 2).transpose(1, 2).contiguous(), None


def _attend(query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None) -> Tensor:
    length = query.shape[2]
    if window is None or length <= window:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    positions = torch.arange(length, device=query.device)
    distance = positions[:, None] - positions
    seen = (distance >= 0) & (distance < window)
    return F.scaled_dot_product_attention(query, key, value, seen, scale=scaling, enable_gqa=True)


def learnt_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the layers whose states a head reads, and after them that of the final norm, which gives the target's
    distribution whether the head reads it or not."""
    return (*(layer for layer in layers if layer < num_layers), num_layers)


def inference_states(inference_target: LanguageModel, token_ids: Sequence[int], layers: Sequence[int]) -> Tensor:
    """Compute the states [n, layers, H] of one document by the model that the head will draft for."""
    cache = inference_target.new_cache()
    try:
        hidden_outputs = inference_target.forward(
            [Rows(cache, list(token_ids), num_logits=1, num_hidden_outputs=len(token_ids))], layers
        ).hidden_outputs
    finally:
        cache.free()
    assert hidden_outputs is not None
    return hidden_outputs


def check_states(states: TargetStates, inference_target: LanguageModel, token_ids: Sequence[int]) -> list[float]:
    """Compare the states of one document in training with those of inference.

    Returns:
        For each layer, the root-mean-square difference over the states' size.

    Raises:
        ConfigError: a layer's differ by more than rounding.
    """
    document = list(token_ids[:CHECKED_TOKENS])
    # the first token's state is larger than all others by orders of magnitude in many models
    expected = inference_states(inference_target, document, states.layers).float().cpu()[1:]
    found = states.of(torch.tensor(document), [len(document)]).float().cpu()[1:]
    differences = ((found - expected).square().mean((0, 2)) / expected.square().mean((0, 2))).sqrt().tolist()
    for layer, difference in zip(states.layers, differences, strict=True):
        if not difference <= MAX_DIFFERENCE:
            raise ConfigError(
                f"the states entering layer {layer} of {inference_target.name} differ by {difference:.0%} of their "
                "size between training and drafting, so that a head trained on them would not fit. Report the "
                "architecture."
            )
    return differences


def frozen_model(name: str, where: torch.device, dtype: torch.dtype) -> Any:
    """Load a target's weights of bfloat16 as Transformers computes it by products of `dtype`, without gradients."""
    return load_transformers_model(name, "bfloat16").eval().requires_grad_(False).to(where, dtype)


class StateCache:
    """A folder of states of one run, whose target and layers do not change.

    Args:
        bound: bytes of the files together, at most.
    """

    def __init__(self, folder: Path, bound: int) -> None:
        self._folder = folder
        self._bound = bound
        self._lock = threading.Lock()
        for path in folder.glob(".row-*.tmp"):  # of a process that was killed
            remove(path)
        self._nbytes = sum(path.stat().st_size for path in folder.glob("row-*.safetensors"))

    def of(self, states: TargetStates, tokens: Tensor, documents: Tensor) -> Tensor:
        """Read or compute the states [N, layers, H] of the documents of packed rows, one after another.

        Args:
            tokens, documents: [rows, window + 1].

        Raises:
            ConfigError: the disk is full.
        """
        return torch.cat([self._row(states, *row) for row in zip(tokens, documents, strict=True)])

    def _row(self, states: TargetStates, tokens: Tensor, documents: Tensor) -> Tensor:
        path = self._folder / f"row-{digest(tokens.numpy(), documents.numpy())}.safetensors"
        try:
            return load(path.read_bytes())[_CACHED]
        except (OSError, SafetensorError, KeyError):
            pass
        used = documents != NO_DOCUMENT
        lengths = torch.unique_consecutive(documents[used], return_counts=True)[1].tolist()
        found = states.of(tokens[used], lengths)
        content = save({_CACHED: found.cpu()})
        with self._lock:
            fits = self._nbytes + len(content) <= self._bound
            self._nbytes += len(content) if fits else 0
        if fits:
            write_bytes(path, content, error=ConfigError)
        return found


@dataclass(frozen=True, slots=True)
class TrainingTarget:
    """The parts of a target that training reads.

    Attributes:
        inference_target: the model that the head will draft for; embeddings and output rows are taken from it.
        states: computes its states of many documents.
        output_rows: [V, H] its output layer's rows of the draft vocabulary, in the type of products.
        columns: [vocabulary] int64 the index of each of the target's tokens in the draft vocabulary; -1 for none.
    """

    inference_target: LanguageModel
    states: TargetStates
    output_rows: Tensor
    columns: Tensor

    @classmethod
    def of(
        cls, inference_target: LanguageModel, model: Any, layers: Sequence[int], vocabulary: Tensor
    ) -> TrainingTarget:
        """Collect the parts of a target.

        Args:
            model: the same as `frozen_model` returns it; from then on it computes states alone.
            layers: that the head reads.
            vocabulary: [V] ids of the tokens that it proposes.
        """
        read = learnt_layers(layers, model.config.get_text_config().num_hidden_layers)
        output_rows = inference_target.output_rows(vocabulary).to(model.dtype, copy=True)
        columns = columns_of(vocabulary, inference_target.vocab_size)
        return cls(inference_target, TargetStates(model, read), output_rows, columns)

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of products."""
        return self.output_rows.dtype

    def embeddings(self, token_ids: Tensor) -> Tensor:
        """Look up embeddings, [N, H] float32. token_ids: [N] int64."""
        found, index = torch.unique(token_ids, return_inverse=True)
        # outside of the model's inference mode, whose tensors no gradient may be computed beside
        return self.inference_target.embedding_rows(found).clone()[index.to(self.inference_target.device)]

    def all_output_rows(self) -> Tensor:
        """Return the whole output layer, [vocabulary, H], in the type of products."""
        every = torch.arange(self.inference_target.vocab_size)
        return self.inference_target.output_rows(every).to(self.dtype, copy=True)

    def replica(self) -> TrainingTarget:
        """Return a copy that shares the weights, for another thread."""
        return replace(self, states=self.states.replica())


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """The inputs of a head for some rows of a batch.

    Attributes:
        rows: on the CPU in training.
        states: [N, layers, hidden] of all tokens, the target's after its final norm last.
        embeddings: [N, hidden] of the same.
        augment: noise and dropout of the states; None without.
    """

    target: TrainingTarget
    rows: HeadRows
    states: Tensor
    embeddings: Tensor
    augment: Augmentation | None = None
