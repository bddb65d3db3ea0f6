"""What a row's token gives every layer besides its embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forerun.models.linear import Linear, Part
from forerun.models.spec.decoder import DecoderSpec, PerLayerInputs


def table_and_product(spec: DecoderSpec, shape: PerLayerInputs, base: Any) -> list[Part]:
    """Return the weights of the table and of the product."""
    names = shape.table, shape.product
    return [Part(f"{spec.base}.{name}.weight", base.get_submodule(name).weight) for name in names]


class PerLayerInputRows:
    """The inputs of all layers.

    Args:
        rows: returns those of tokens in the table, [n, layers * width].
        product: of embeddings.
        normed: norms rows, [n, width].
        dtype: of the model.
    """

    def __init__(
        self,
        shape: PerLayerInputs,
        rows: Callable[[Tensor], Tensor],
        product: Linear,
        normed: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
    ) -> None:
        self._shape = shape
        self._rows = rows
        self._product = product
        self._normed = normed
        self._table_scale = float(torch.tensor(shape.width**0.5, dtype=torch.float64).to(dtype))

    def of(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """Return what tokens [T] with these embeddings, [T, hidden], give each layer, [T, layers, width]."""
        given = self._product.forward(x) * self._product.in_features**-0.5
        given = self._normed(given.view(-1, self._shape.width)).view(given.shape)
        both = (given + self._rows(token_ids) * self._table_scale) * 2**-0.5
        return both.view(len(x), -1, self._shape.width)
