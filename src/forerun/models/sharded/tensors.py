"""Parts of tensors that are not read yet: of a safetensors file, a rank reads its own part alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

from torch import Tensor

from forerun.models.sharded.shard import Cut, Shard
from forerun.models.weights import TensorSlice


@dataclass(frozen=True, slots=True)
class PartSlice:
    """Part of a tensor (`TensorSlice`)."""

    whole: TensorSlice
    cut: Cut

    def get_shape(self) -> list[int]:
        """Of the part."""
        shape = list(self.whole.get_shape())
        if self.cut.dim < len(shape):
            shape[self.cut.dim] = max(0, min(self.cut.last, shape[self.cut.dim]) - self.cut.first)
        return shape

    def get_dtype(self) -> str:
        """As `TensorSlice.get_dtype`."""
        return self.whole.get_dtype()

    def __getitem__(self, index: EllipsisType) -> Tensor:
        """The part, read now."""
        return read_part(self.whole, self.cut)


def read_part(whole: TensorSlice, cut: Cut) -> Tensor:
    """Part of a tensor: of a safetensors file its bytes alone; of others, all is read and the rest dropped."""
    index = (slice(None),) * cut.dim + (slice(cut.first, cut.last),)
    if type(whole).__module__.partition(".")[0] in ("safetensors", "builtins"):
        source: Any = whole
        part: Tensor = source[index]
        return part
    return whole[...][index].clone()


def parts(slices: Mapping[str, TensorSlice], shard: Shard) -> dict[str, TensorSlice]:
    """A rank's part of each tensor, by Transformers' names."""
    found: dict[str, TensorSlice] = {}
    for name, whole in slices.items():
        cut = shard.cut(name)
        found[name] = whole if cut is None else PartSlice(whole, cut)
    return found
