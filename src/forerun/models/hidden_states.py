"""Hidden states of chosen layers, returned beside the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.models.attention.base import Layout


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
            self._states.append(requested.clone() if norm is None else norm(requested))

    def stacked(self) -> Tensor | None:
        """Return the states, [T, layers, H], or None if no layer was chosen."""
        return torch.stack(self._states, 1) if self._states else None


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
