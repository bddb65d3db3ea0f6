"""Which part of a model is whose."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from forerun.errors import ConfigError, UnsupportedModelError
from forerun.kernels.quantised_weight import GROUP
from forerun.models.llama import head_shape

_BLOCK = 16
"""Rows of the vocabulary in a unit: a block of the native kernels."""
_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_COLUMNS = ("o_proj", "down_proj")
_VOCABULARY = ("lm_head", "embed_tokens")

Span = tuple[int, int]
"""First and last but one."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Part of a tensor: entries first..last of its dimension `dim`."""

    dim: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one rank. Query heads stay with their key head; shares may be uneven.

    Attributes:
        rank: whose part it is. count: of ranks.
        heads: query heads. kv_heads: key heads. head_dim: of both.
        intermediate: of the feed-forward layers, in whole groups of inputs.
        vocabulary: tokens whose logits it computes.
        num_heads, num_kv_heads, num_intermediate, vocab_size: of the whole model.
    """

    rank: int
    count: int
    heads: Span
    kv_heads: Span
    head_dim: int
    intermediate: Span
    vocabulary: Span
    num_heads: int
    num_kv_heads: int
    num_intermediate: int
    vocab_size: int

    @classmethod
    def of(cls, config: Any, rank: int, count: int) -> Shard:
        """The part of a rank in a model of this Transformers configuration.

        Raises:
            ConfigError: there are more ranks than key heads.
        """
        heads, kv_heads, width = head_shape(config)
        if count > kv_heads:
            raise ConfigError(
                f"tensor_parallel is {count}, but the model has {kv_heads} key heads, which cannot be shared by more "
                f"ranks. Give at most {kv_heads}."
            )
        first, last = share(kv_heads, rank, count)
        group = heads // kv_heads
        return cls(
            rank=rank,
            count=count,
            heads=(first * group, last * group),
            kv_heads=(first, last),
            head_dim=width,
            intermediate=share_of_units(config.intermediate_size, GROUP, rank, count),
            vocabulary=share_of_units(config.vocab_size, _BLOCK, rank, count),
            num_heads=heads,
            num_kv_heads=kv_heads,
            num_intermediate=config.intermediate_size,
            vocab_size=config.vocab_size,
        )

    def config(self, config: Any) -> Any:
        """The configuration of a model that consists of this part alone."""
        part = copy.deepcopy(config)
        part.head_dim = self.head_dim
        part.num_attention_heads = _length(self.heads)
        part.num_key_value_heads = _length(self.kv_heads)
        part.intermediate_size = _length(self.intermediate)
        part.vocab_size = _length(self.vocabulary)
        part.pad_token_id = None  # it may lie in another part
        return part

    def cut(self, name: str) -> Cut | None:
        """What this part has of a tensor of Transformers' name; None: all of it."""
        module, _, kind = name.rpartition(".")
        layer = module.rpartition(".")[2]
        if layer in _VOCABULARY:
            return Cut(0, *self.vocabulary)
        if layer in _BY_ROWS:
            return Cut(0, *self._inner(layer))
        if layer in _BY_COLUMNS and kind == "weight":
            return Cut(1, *self._inner(layer))
        return None  # norms; the biases of what is added up, which are added once

    def num_inputs(self, name: str) -> int:
        """Inputs of a row-parallel layer on all ranks together, by the name of its weight."""
        return self.num_heads * self.head_dim if "o_proj" in name else self.num_intermediate

    def check_groups(self, name: str, model: str) -> None:
        """Refuse to cut a weight in codes within a group of inputs that share a scale.

        Raises:
            UnsupportedModelError: it would be.
        """
        cut = self.cut(name)
        assert cut is not None
        for border in (cut.first, cut.last):
            if border % GROUP and border != self.num_inputs(name):
                raise UnsupportedModelError(
                    f"{model}: {name} is in codes with a scale for {GROUP} inputs each, and {self.count} ranks would "
                    f"cut it at input {border}, within such a group. Give another tensor_parallel, or quantize='int8'."
                )

    def _inner(self, layer: str) -> Span:
        """The inner numbers of attention or of the feed-forward layer that this part has, of one of their layers."""
        if layer in ("gate_proj", "up_proj", "down_proj"):
            return self.intermediate
        first, last = self.kv_heads if layer in ("k_proj", "v_proj") else self.heads
        return first * self.head_dim, last * self.head_dim


def is_summed(name: str) -> bool:
    """Whether the ranks' products with a weight are added up, since each has some of its inputs; by its name."""
    return name.endswith(tuple(f"{layer}.weight" for layer in _BY_COLUMNS))


def share(count: int, rank: int, ranks: int) -> Span:
    """The share of a rank in so many things: contiguous, in rank order, none larger than another by more than one."""
    return count * rank // ranks, count * (rank + 1) // ranks


def share_of_units(count: int, unit: int, rank: int, ranks: int) -> Span:
    """The same in whole units, of which the last may be shorter.

    Raises:
        ConfigError: there are more ranks than units.
    """
    units = -(-count // unit)
    if ranks > units:
        raise ConfigError(f"tensor_parallel is {ranks}, but {count} numbers make {units} shares of {unit} at most.")
    first, last = share(units, rank, ranks)
    return first * unit, min(last * unit, count)


def _length(span: Span) -> int:
    return span[1] - span[0]
