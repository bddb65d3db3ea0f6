"""The contract of decoders that compute a range of layers: what early exit, and what goes on from a layer, rest on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from forerun.models.attention.base import Layout, Planner
from forerun.models.chains import Chains, Pick
from forerun.models.taps import Taps
from forerun.types import Cache


class LayerRangeDecoder(ABC):
    """A decoder whose layers can be computed in parts.

    Attributes:
        num_layers: layers, each with keys and values that belong to it alone.
        planner: what prepares its forwards, and makes their caches.
    """

    num_layers: int
    planner: Planner

    def forward(self, layout: Layout, layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """As `Decoder.forward`."""
        taps = Taps(layers, layout)
        logits = self.head(self.through(self.embed(layout), layout, 0, self.num_layers, taps), layout, taps)
        return logits, taps.stacked()

    def chains(self, caches: Sequence[Cache], pick: Pick) -> Chains | None:
        """As `LanguageModel.chains`."""
        return None

    @abstractmethod
    def embed(self, layout: Layout) -> Tensor:
        """What enters the first layer, [T, hidden]."""

    @abstractmethod
    def through(self, x: Tensor, layout: Layout, first: int, last: int, taps: Taps) -> Tensor:
        """What enters layer `last`, of what entered layer `first`: [T, hidden] -> [T, hidden]."""

    @abstractmethod
    def head(self, x: Tensor, layout: Layout, taps: Taps) -> Tensor:
        """Logits of the wanted rows, [R, V], of what leaves the last layer or, to exit early, any other."""

    @abstractmethod
    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        """As `Decoder.embedding_rows`."""

    @abstractmethod
    def output_rows(self, token_ids: Tensor) -> Tensor:
        """As `Decoder.output_rows`."""
