"""What attention with latents is made of, as data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Latent:
    """What attention with latents is made of: of each position one latent, of which all heads make keys and values, and
    one rotated key, which they share.

    Its roles are "query", of the row, or of what "entry" gives behind "entry_norm"; and "latent", which gives the
    latent, behind "latent_norm", and the key. Each head of a query has first what is not rotated.

    Attributes:
        rank: numbers of the latent.
        value_width: of a head's value.
        entry_width: numbers that queries are made of; 0: they are made of the row.
        expansion: the module of a layer that makes of a latent each head's key, but for what is rotated, and value. Its
            weight stays numbers: one part is multiplied from the other side, and its groups of inputs would be others.
        eps: of both norms.
    """

    rank: int
    value_width: int
    entry_width: int = 0
    expansion: str = "self_attn.kv_b_proj"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if min(self.rank, self.value_width) < 1:
            raise ValueError(f"a latent of {self.rank} numbers, values of {self.value_width}")

    def rows(self, heads: int, width: int, rotated: int, order: Tensor | None) -> Tensor:
        """Return the rows of heads of this width with what is rotated, the last numbers in the files, first, int64.

        order: of what is rotated and more, as `DecoderSpec.head_order`.
        """
        turned = torch.arange(rotated) if order is None else order[:rotated]
        head = torch.cat([width - rotated + turned, torch.arange(width - rotated)])
        return (torch.arange(0, heads * width, width)[:, None] + head).reshape(-1)
