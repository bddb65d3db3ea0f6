"""From a source to one rank's part of its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from forerun.config import NATIVE, REFERENCE
from forerun.errors import ModelLoadError
from forerun.kernels.native.library import Library
from forerun.kernels.native_linear import NativeLinear
from forerun.models.configuration import context_length
from forerun.models.decoders import library_for
from forerun.models.general import ATTENTION_NAME, register_attention
from forerun.models.linear import FloatMaker, Maker, Part
from forerun.models.model import Decoder, Model
from forerun.models.quantising import Quantisation, QuantisedMaker, stored_numbers, streamed
from forerun.models.reading import served_dtype
from forerun.models.sharded.decoders import ShardedLlamaDecoder, ShardedNativeDecoder
from forerun.models.sharded.entrance import Entrance, Table
from forerun.models.sharded.linear import GatheredLogits
from forerun.models.sharded.maker import ShardQuantisedMaker
from forerun.models.sharded.shard import Shard
from forerun.models.sharded.tensors import parts
from forerun.models.sources import ModelSource
from forerun.models.sources.folder_source import FolderSource
from forerun.models.sources.gguf_source import GgufSource
from forerun.models.transformers_model import empty_model, read_model
from forerun.models.weights import Checkpoint
from forerun.ranks.peers import Peers

_Kind = TypeVar("_Kind", bound=Model)
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is loaded, before it is.

    Attributes:
        source, config: of the whole model.
        dtype: of all that is not in codes.
        quantisation: of the weights; None: they are numbers.
    """

    source: ModelSource
    config: Any
    dtype: torch.dtype
    quantisation: Quantisation | None

    @classmethod
    def of(cls, source: ModelSource, config: Any, dtype: str, quantisation: Quantisation | None) -> Plan:
        served = served_dtype(source, dtype, is_quantised=quantisation is not None)
        return cls(source, config, served, quantisation)

    @property
    def library(self) -> Library | None:
        """The native library, where it computes the model."""
        return library_for(torch.device("cpu"), self.dtype, is_quantised=self.quantisation is not None)

    def float_maker(self) -> FloatMaker:
        """Makes layers of numbers."""
        return FloatMaker() if self.library is None else FloatMaker(partial(NativeLinear, self.library))

    @property
    def wide(self) -> torch.dtype:
        """What partial products and logits are gathered in."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def build(kind: type[_Kind], plan: Plan, shard: Shard, peers: Peers, entrance: Entrance) -> _Kind:
    """This rank's part of a model.

    Args:
        kind: `Model`, or a class of the same arguments.
    """
    hf, maker = _read(plan, shard)
    gathered = GatheredLogits(peers, _widths(plan, peers.count), plan.wide)
    library = plan.library
    decoder: Decoder
    if library is None:
        decoder = ShardedLlamaDecoder(hf, maker, entrance, shard, peers, gathered, plan.wide)
    else:
        decoder = ShardedNativeDecoder(hf, library, maker, plan.dtype, entrance, shard, peers, gathered)
    config = plan.config
    model = kind(
        decoder,
        name=plan.source.name,
        vocab_size=config.vocab_size,
        context_length=context_length(config),
        eos_token_ids=plan.source.eos_token_ids(config),
        dtype=plan.dtype,
        device=torch.device("cpu"),
        num_parameters=sum(p.numel() for p in empty_model(plan.source.name, config, plan.dtype).parameters()),
        kind="llama",
    )
    model.quantize, model.ranks = plan.quantisation, peers.count
    model.kernels = REFERENCE if library is None else f"{NATIVE} {library.instructions}"
    return model


def embeddings(plan: Plan) -> Table:
    """The table of embeddings of all tokens, as one process reads it.

    Raises:
        ModelLoadError: there is none.
    """
    checkpoint = plan.source.checkpoint(plan.config, torch.float32 if plan.quantisation else plan.dtype)
    name = _embedding_name(checkpoint, plan)
    whole = torch.zeros((), dtype=plan.dtype).expand(checkpoint.shape(name))
    part = Part(f"model.{_EMBEDDING}", whole)
    if plan.quantisation is None:
        part = part._replace(weight=checkpoint.slices[name][...].to(plan.dtype))
        maker: Maker = plan.float_maker()
    else:
        numbers = stored_numbers(checkpoint.slices, plan.config.tie_word_embeddings)
        stored = plan.source.quantised_weight(plan.config)
        maker = QuantisedMaker(plan.quantisation, stored, numbers, plan.dtype)
    if plan.library is not None:
        return maker.linear([part], is_head=True).rows
    table = maker.embedding(part)

    def rows(token_ids: Tensor) -> Tensor:
        return table[token_ids]

    return rows


def _embedding_name(checkpoint: Checkpoint, plan: Plan) -> str:
    tied: tuple[str, ...] = (_HEAD,) if plan.config.tie_word_embeddings else ()
    for name in (f"model.{_EMBEDDING}", _EMBEDDING, *tied):
        if name in checkpoint.slices:
            return name
    raise ModelLoadError(f"{plan.source.name} lacks weights: model.{_EMBEDDING} is not among its tensors.")


def _read(plan: Plan, shard: Shard) -> tuple[Any, Maker]:
    """Transformers' model of a rank's part, and what makes its layers."""
    register_attention()
    source, config = plan.source, plan.config
    if plan.quantisation is None:
        checkpoint = source.checkpoint(config, plan.dtype)
        maker: Maker = plan.float_maker()
    else:
        checkpoint = source.checkpoint(config, torch.float32)
        numbers = stored_numbers(checkpoint.slices, config.tie_word_embeddings)
        stored = source.quantised_weight(config)
        maker = ShardQuantisedMaker(plan.quantisation, stored, numbers, plan.dtype, shard, source.name)
        checkpoint = replace(checkpoint, unread=streamed(checkpoint.slices, config.tie_word_embeddings))
    checkpoint = replace(checkpoint, slices=parts(checkpoint.slices, shard))
    return read_model(source.name, shard.config(config), checkpoint, plan.dtype, ATTENTION_NAME), maker


def _widths(plan: Plan, count: int) -> list[int]:
    """Tokens of each rank."""
    spans = (Shard.of(plan.config, rank, count).vocabulary for rank in range(count))
    return [last - first for first, last in spans]


def weight_files(source: ModelSource) -> Sequence[Path]:
    """The files that a model's weights lie in."""
    if isinstance(source, FolderSource):
        return source.folder.weight_files()
    assert isinstance(source, GgufSource)
    return [source.path]
