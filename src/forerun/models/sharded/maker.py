"""What makes a rank's layers of its part of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from forerun.kernels.quantised_embedding import QuantisedEmbedding
from forerun.kernels.quantised_weight import QuantisedWeight
from forerun.models.linear import FloatMaker, Linear, Maker, Part
from forerun.models.quantising import Quantisation, QuantisedMaker
from forerun.models.sharded.linear import GatheredLogits, GatheringLinear, summing
from forerun.models.sharded.shard import Shard, is_summed
from forerun.models.sharded.tensors import PartSlice
from forerun.models.weights import TensorSlice
from forerun.ranks.peers import Peers


class ShardMaker:
    """Makes layers for the PyTorch decoder (`Maker`): those that ranks add up, and the output layer, are wrapped.

    Args:
        inner: of this rank's part.
        wide: what partial products and logits are gathered in.
    """

    def __init__(self, inner: Maker, shard: Shard, peers: Peers, gathered: GatheredLogits, wide: torch.dtype) -> None:
        self._inner, self._shard, self._peers, self._gathered, self._wide = inner, shard, peers, gathered, wide

    def linear(self, parts: Sequence[Part], bias: Tensor | None = None, *, is_head: bool = False) -> Linear:
        """As `Maker.linear`."""
        if is_head:
            inner = self._inner.linear(parts, bias, is_head=True)
            return GatheringLinear(inner, self._gathered, self._shard.vocab_size)
        if not is_summed(parts[0].name):
            return self._inner.linear(parts, bias)
        if isinstance(self._inner, FloatMaker):  # a product of bfloat16 would be rounded before it is added up
            parts = [part._replace(weight=part.weight.to(self._wide)) for part in parts]
        inner = self._inner.linear(parts)
        return summing(inner, bias, self._peers, self._wide, self._shard.num_inputs(parts[0].name))

    def embedding(self, part: Part) -> Tensor | QuantisedEmbedding:
        """As `Maker.embedding`, of this rank's tokens."""
        return self._inner.embedding(part)


class ShardQuantisedMaker(QuantisedMaker):
    """As `QuantisedMaker`, of one rank's part. Of a weight whose outputs are shared out, its rows alone are read; of
    one whose inputs are, all is read and quantised, since an output's scale comes from all of its inputs, and then cut.
    """

    def __init__(
        self,
        quantise: Quantisation,
        stored: Callable[[str], QuantisedWeight | None] | None,
        numbers: Mapping[str, TensorSlice],
        dtype: torch.dtype,
        shard: Shard,
        model: str,
    ) -> None:
        super().__init__(quantise, None if stored is None else _rows_of(stored, shard), _parts(numbers, shard), dtype)
        self._shard, self._model = shard, model

    def weight(self, part: Part, *, is_outer: bool = False) -> QuantisedWeight:
        """As `QuantisedMaker.weight`."""
        weight = super().weight(part, is_outer=is_outer)
        cut = self._shard.cut(part.name)
        if cut is None or cut.dim == 0:
            return weight
        if weight.group is not None:
            self._shard.check_groups(part.name, self._model)
        return weight.columns(cut.first, cut.last)


def _rows_of(stored: Callable[[str], QuantisedWeight | None], shard: Shard) -> Callable[[str], QuantisedWeight | None]:
    def read(name: str) -> QuantisedWeight | None:
        weight, cut = stored(name), shard.cut(name)
        if weight is None or cut is None or cut.dim == 1:
            return weight
        return weight.rows(torch.arange(cut.first, cut.last))

    return read


def _parts(numbers: Mapping[str, TensorSlice], shard: Shard) -> dict[str, TensorSlice]:
    found: dict[str, TensorSlice] = {}
    for name, whole in numbers.items():
        cut = shard.cut(name)
        found[name] = PartSlice(whole, cut) if cut is not None and cut.dim == 0 else whole
    return found
