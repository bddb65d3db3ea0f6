"""The target as training reads it: hidden states of many documents at once, embeddings and output rows.

States come from the forward that drafting takes them from, with the same weights, quantized or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from forerun.errors import ConfigError
from forerun.models import LanguageModel, Model, Rows
from forerun.models.base import Forward
from forerun.train.accelerator import columns_of
from forerun.train.data.packed import NO_DOCUMENT
from forerun.train.heads.module import Augmentation, HeadRows, document_lengths
from forerun.utils.files import digest, write_bytes

FORWARD_ROWS = {"cpu": 512, "cuda": 8_192, "mps": 512}
"""Rows of documents that are computed together, at most, but for one document of more: as many as give a prompt's full
speed."""
FORWARD_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 30, "mps": 1 << 25}
"""Logits that are computed together, likewise."""
_CHUNK = 64
"""Rows whose logits are reduced together."""
_CACHED = "states"


def forwards(
    model: LanguageModel, documents: Sequence[list[int]], num_logits: Sequence[int], layers: Sequence[int] = ()
) -> Iterator[tuple[slice, Forward]]:
    """Compute documents, as many at a time as give a prompt's full speed: yield which, in order, and their forward.

    Args:
        num_logits: for each document, after how many of its last tokens.
        layers: whose entering states there are, after every token.
    """
    most_rows = FORWARD_ROWS[model.device.type]
    most_logits = FORWARD_LOGITS[model.device.type] // model.vocab_size
    lengths = [len(each) for each in documents]
    first = 0
    for end in range(1, len(documents) + 1):
        wider = slice(first, end + 1)
        if end < len(documents) and sum(lengths[wider]) <= most_rows and sum(num_logits[wider]) <= most_logits:
            continue
        here = slice(first, end)
        first = end
        caches = [model.new_cache() for _ in documents[here]]
        given = zip(caches, documents[here], num_logits[here], strict=True)
        batch = [
            Rows(cache, ids, num_logits=num, num_hidden_outputs=len(ids) if layers else 0) for cache, ids, num in given
        ]
        try:
            yield here, model.forward(batch, layers)
        finally:
            for cache in caches:
                cache.free()


class TargetStates:
    """Computes the states that enter chosen layers.

    Args:
        model: the target.
        layers: rising; the number of its layers stands for the state after the final norm.

    Attributes:
        dtype: that they are kept in.
        device: where they are computed.
    """

    dtype = torch.bfloat16

    def __init__(self, model: LanguageModel, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.device = model.device
        self._model = model

    def of(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Compute the states [N, layers, H] of documents laid one after another. token_ids: [N] int64."""
        return torch.cat([self._states(each) for each in self._forwards(token_ids, lengths, [0] * len(lengths))])

    def judged(
        self, token_ids: Tensor, lengths: Sequence[int], num_logits: Sequence[int], vocabulary: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the states as `of`, and what the target predicts after the last tokens of each document.

        Args:
            num_logits: for each document, after how many of them.
            vocabulary: [V] ids.

        Returns:
            The states; [N] int64 the most probable token after each token, -1 where none is asked for; [N] float32 the
            probability of the whole vocabulary there.
        """
        vocabulary = vocabulary.to(self.device)
        states = []
        tokens = []
        masses = []
        for each in self._forwards(token_ids, lengths, num_logits):
            states.append(self._states(each))
            for logits in torch.split(each.logits, _CHUNK):
                tokens.append(logits.argmax(-1))
                masses.append((logits[:, vocabulary].logsumexp(-1) - logits.logsumexp(-1)).exp().float())
        joined = torch.cat(states)
        last = [torch.arange(length) >= length - num for length, num in zip(lengths, num_logits, strict=True)]
        asked = torch.cat(last).nonzero()[:, 0].to(joined.device)
        likeliest = torch.full((len(joined),), -1, device=joined.device)
        mass = torch.zeros(len(joined), device=joined.device)
        if len(asked):
            likeliest[asked] = torch.cat(tokens)
            mass[asked] = torch.cat(masses)
        return joined, likeliest, mass

    def _states(self, found: Forward) -> Tensor:
        assert found.hidden_outputs is not None
        # a copy outside of the model's inference mode, whose tensors no gradient may be computed beside
        return found.hidden_outputs.to(self.dtype, copy=True)

    def _forwards(self, token_ids: Tensor, lengths: Sequence[int], num_logits: Sequence[int]) -> Iterator[Forward]:
        """Compute some documents at a time, in order."""
        documents = [part.tolist() for part in torch.split(token_ids, list(lengths))]
        return (found for _, found in forwards(self._model, documents, num_logits, self.layers))


def learnt_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the layers whose states a head reads, and after them that of the final norm, which gives the target's
    distribution whether the head reads it or not."""
    return (*(layer for layer in layers if layer < num_layers), num_layers)


class PackedStates:
    """Computes the states of packed rows, and may keep those of some in a folder, which is of one run alone: its target
    and layers do not change.

    Args:
        folder: None keeps nothing.
        bound: bytes of the files together, at most.
    """

    def __init__(self, states: TargetStates, folder: Path | None = None, bound: int = 0) -> None:
        self._states = states
        self._folder = folder
        self._bound = bound
        self._nbytes = 0
        if folder is not None:
            self._nbytes = sum(path.stat().st_size for path in folder.glob("row-*.safetensors"))

    def of(self, tokens: Tensor, documents: Tensor) -> Tensor:
        """Read or compute the states [rows, window + 1, layers, H] of packed rows; zeros where there is no token.

        Args:
            tokens, documents: [rows, window + 1].

        Raises:
            ConfigError: the disk is full.
        """
        used = documents != NO_DOCUMENT
        found = [self._kept(*row) for row in zip(tokens, documents, strict=True)]
        missing = [index for index, each in enumerate(found) if each is None]
        if missing:
            there = used[missing]
            computed = self._states.of(tokens[missing][there], document_lengths(documents[missing], there))
            for index, each in zip(missing, torch.split(computed, there.sum(1).tolist()), strict=True):
                found[index] = each
                self._keep(tokens[index], documents[index], each)
        states = torch.cat([each.to(self._states.device) for each in found if each is not None])
        rows = states.new_zeros(*used.shape, *states.shape[1:])
        rows[used.to(rows.device)] = states
        return rows

    def _path(self, tokens: Tensor, documents: Tensor) -> Path:
        assert self._folder is not None
        return self._folder / f"row-{digest(tokens.numpy(), documents.numpy())}.safetensors"

    def _kept(self, tokens: Tensor, documents: Tensor) -> Tensor | None:
        """Return the states [n, layers, H] of a row that are on disk."""
        if self._folder is None:
            return None
        try:
            return load(self._path(tokens, documents).read_bytes())[_CACHED]
        except (OSError, SafetensorError, KeyError):
            return None

    def _keep(self, tokens: Tensor, documents: Tensor, states: Tensor) -> None:
        """Write the states of a row, if there is room for them."""
        if self._folder is None or self._nbytes + states.nbytes > self._bound:
            return
        content = save({_CACHED: states.cpu().contiguous()})
        if self._nbytes + len(content) <= self._bound:
            write_bytes(self._path(tokens, documents), content, error=ConfigError)
            self._nbytes += len(content)


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
        cls, inference_target: Model, layers: Sequence[int], vocabulary: Tensor, dtype: torch.dtype
    ) -> TrainingTarget:
        """Collect the parts of a target.

        Args:
            layers: that the head reads.
            vocabulary: [V] ids of the tokens that it proposes.
            dtype: of products.
        """
        states = TargetStates(inference_target, learnt_layers(layers, inference_target.num_layers))
        output_rows = inference_target.output_rows(vocabulary).to(dtype, copy=True)
        return cls(inference_target, states, output_rows, columns_of(vocabulary, inference_target.vocab_size))

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of products."""
        return self.output_rows.dtype

    def embeddings(self, token_ids: Tensor) -> Tensor:
        """Look up embeddings, [N, H] float32. token_ids: [N] int64."""
        found, index = torch.unique(token_ids, return_inverse=True)
        # outside of the model's inference mode, whose tensors no gradient may be computed beside
        return self.inference_target.embedding_rows(found).clone()[index.to(self.inference_target.device)]


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
