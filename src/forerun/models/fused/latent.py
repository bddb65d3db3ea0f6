"""Attention with latents: its weights by head, and in PyTorch what csrc/kernels/latent.h computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forerun.kernels.torch.elementwise import rms_norm
from forerun.models.fused.spec import DecoderSpec
from forerun.models.linear import Linear, make_linear
from forerun.models.rotation import rotate


def weights_by_head(spec: DecoderSpec, layer: Any) -> tuple[Tensor, Tensor]:
    """Return what brings queries to the latent, [heads, rank, plain], but for what is rotated of them; and what brings
    sums of latents to values, [heads, value_width, rank]."""
    shape, plain = spec.latent, spec.head_dim - spec.rotated
    assert shape is not None
    weight: Tensor = layer.get_submodule(shape.expansion).weight.detach()
    both = weight.view(spec.num_heads, plain + shape.value_width, shape.rank)
    return both[:, :plain].transpose(1, 2), both[:, plain:]


class LatentLayer:
    """What surrounds the attention of one layer, which has one key head.

    Args:
        layer: the modules of a layer.
        linears: by role. norms: the weights of "entry_norm" and "latent_norm", in the type to compute in.
        dtype: of rows.

    Attributes:
        heads: of each head, the products before and behind attention. expansion: the module that has both.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        layer: Any,
        linears: Mapping[str, Linear],
        norms: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> None:
        assert spec.latent is not None
        self._spec, self._linears, self._norms, self._dtype = spec, linears, norms, dtype
        self.expansion = spec.latent.expansion
        self._eps = norms["latent_norm"].new_tensor(spec.latent.eps)
        absorbing, expanding = weights_by_head(spec, layer)
        self.heads = [
            (make_linear(before.to(dtype).contiguous()), make_linear(behind.to(dtype).contiguous()))
            for before, behind in zip(absorbing, expanding, strict=True)
        ]

    def enter(self, h: Tensor, turns: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, heads, key width], keys [T, 1, key width] and values [T, 1, rank], in the type to compute
        in.

        Args:
            h: [T, hidden], normed rows.
            turns: of `rotate`; None: nothing is rotated.
        """
        spec, rows = self._spec, h
        if "entry" in self._linears:
            rows = rms_norm(self._linears["entry"].forward(h), self._norms["entry_norm"], self._eps)
        query = self._linears["query"].forward(rows).to(self._eps).view(len(h), spec.num_heads, spec.head_dim)
        key = self._linears["latent"].forward(h).to(self._eps)[:, None]
        if turns is not None:
            rotate(query[:, :, : spec.rotated], turns)
            rotate(key[:, :, : spec.rotated], turns)
        value = rms_norm(key[:, :, spec.rotated :], self._norms["latent_norm"], self._eps)
        plain = query[:, :, spec.rotated :].to(self._dtype).unbind(1)
        brought = [before.forward(part.contiguous()) for part, (before, _) in zip(plain, self.heads, strict=True)]
        query = torch.cat([query[:, :, : spec.rotated], torch.stack(brought, 1).to(self._eps)], 2)
        return query, torch.cat([key[:, :, : spec.rotated], value], 2), value

    def leave(self, mixed: Tensor) -> Tensor:
        """Return values, [T, heads * value_width], of sums of latents, [T, heads * rank]."""
        parts = mixed.view(len(mixed), len(self.heads), -1).unbind(1)
        found = [behind.forward(part.contiguous()) for part, (_, behind) in zip(parts, self.heads, strict=True)]
        return torch.cat(found, 1)
