"""Attention with latents: in PyTorch what csrc/kernels/latent.h computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forerun.kernels.torch.elementwise import rms_norm
from forerun.models.fused.parts import weights_by_head
from forerun.models.linear import Linear, make_linear
from forerun.models.rope import apply_rotary
from forerun.models.spec.attention import LatentAttention


class LatentLayer:
    """What surrounds the attention of one layer, which has one key head.

    Args:
        layer: the modules of a layer.
        linears: by role. norms: the weights of "q_a_layernorm" and "kv_a_layernorm", in the type to compute in.
        dtype: of rows.

    Attributes:
        heads: of each head, the products before and behind attention. kv_b_proj: the module that has both.
    """

    def __init__(
        self,
        own: LatentAttention,
        layer: Any,
        linears: Mapping[str, Linear],
        norms: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> None:
        self._own = own
        self._linears = linears
        self._norms = norms
        self._dtype = dtype
        self.kv_b_proj = own.kv_b_proj
        self._eps = norms["kv_a_layernorm"].new_tensor(own.eps)
        absorbing, expanding = weights_by_head(own, layer)
        self.heads = [
            (make_linear(before.to(dtype).contiguous()), make_linear(behind.to(dtype).contiguous()))
            for before, behind in zip(absorbing, expanding, strict=True)
        ]

    def enter(self, h: Tensor, cos_sin: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, heads, key width], keys [T, 1, key width] and values [T, 1, kv_lora_rank], in the type to
        compute in.

        Args:
            h: [T, hidden], normed rows.
            cos_sin: of `apply_rotary`; None: nothing is rotated.
        """
        own = self._own
        rows = h
        if "q_a_proj" in self._linears:
            rows = rms_norm(self._linears["q_a_proj"].forward(h), self._norms["q_a_layernorm"], self._eps)
        query = self._linears["query"].forward(rows).to(self._eps).view(len(h), own.num_heads, own.head_dim)
        key = self._linears["kv_a_proj"].forward(h).to(self._eps)[:, None]
        if cos_sin is not None:
            apply_rotary(query[:, :, : own.rotated], cos_sin)
            apply_rotary(key[:, :, : own.rotated], cos_sin)
        value = rms_norm(key[:, :, own.rotated :], self._norms["kv_a_layernorm"], self._eps)
        plain = query[:, :, own.rotated :].to(self._dtype).unbind(1)
        brought = [before.forward(part.contiguous()) for part, (before, _) in zip(plain, self.heads, strict=True)]
        query = torch.cat([query[:, :, : own.rotated], torch.stack(brought, 1).to(self._eps)], 2)
        return query, torch.cat([key[:, :, : own.rotated], value], 2), value

    def leave(self, latents: Tensor) -> Tensor:
        """Return values, [T, heads * v_head_dim], of sums of latents, [T, heads * kv_lora_rank]."""
        parts = latents.view(len(latents), len(self.heads), -1).unbind(1)
        found = [behind.forward(part.contiguous()) for part, (_, behind) in zip(parts, self.heads, strict=True)]
        return torch.cat(found, 1)
