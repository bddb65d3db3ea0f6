"""An embedding table in codes: the rows that are asked for are dequantised."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.quantised_weight import QuantisedWeight


class QuantisedEmbedding:
    """What a table of [V, hidden] numbers gives when it is indexed with token ids.

    Args:
        weight: [V, hidden]. dtype: of the rows that it gives.
    """

    def __init__(self, weight: QuantisedWeight, dtype: torch.dtype) -> None:
        self.quantised, self.dtype = weight, dtype

    @property
    def device(self) -> torch.device:
        """Where the codes lie."""
        return self.quantised.codes.device

    def __getitem__(self, token_ids: Tensor) -> Tensor:
        """[n] int64 -> [n, hidden]."""
        return self.quantised.rows(token_ids).dequantise(self.dtype)
