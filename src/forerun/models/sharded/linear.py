"""Linear layers of which each rank computes a part: sums over ranks, in their order, and the output layer's logits."""

from __future__ import annotations

import zlib
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.kernels.native_linear import NativeLinear
from forerun.kernels.quantise import largest_summed_code
from forerun.kernels.quantised_linear import QuantisedLinear
from forerun.models.linear import Linear, WrappedLinear
from forerun.ranks.peers import Peers

COMPARED_EVERY = 64
"""Forwards from one comparison of the ranks' states to the next."""


class SummingLinear(WrappedLinear[Linear]):
    """The product of all ranks' inputs, of which this one has some: y = sum of the ranks' partial products + b.

    Partial products are gathered in float32 (float64 of a float64 model), added from rank 0 on, rounded once, and the
    residual is added to that. So a row's bits do not depend on the number of rows, and all ranks get the same ones.

    Args:
        inner: the product with this rank's inputs, without a bias, which takes rows of type `wide` and gives such.
        bias: [out] or None. wide: what partial products are computed in.
    """

    def __init__(self, inner: Linear, bias: Tensor | None, peers: Peers, wide: torch.dtype) -> None:
        super().__init__(inner, inner.out_features)
        self._peers, self._wide = peers, wide
        self._bias = None if bias is None else bias.detach().to(wide)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, this rank's inputs] -> [T, out] in x's type."""
        return self._sum(x).to(x.dtype)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + forward(x), the product rounded to the residual's type. residual: [T, out]."""
        return residual + self._sum(x).to(residual.dtype)

    def _sum(self, x: Tensor) -> Tensor:
        return _total(self._peers.exchange(self.inner.forward(x.to(self._wide)).contiguous()), self._bias)


class CodeLinear(Linear, Protocol):
    """A product with codes of 8 bits and one scale per output, taken apart: `NativeLinear`, `QuantisedLinear`."""

    def sums(self, x: Tensor, magnitudes: Tensor, limit: int) -> Tensor:
        """Sums of products of codes. x: [n, in] float32; magnitudes: [n], the largest of each row, which has inputs
        elsewhere too; limit: of its codes. [n, out] int32."""

    def channel_scales(self) -> Tensor:
        """[out] float32."""


class SummingCodes(WrappedLinear[CodeLinear]):
    """The same of codes with one scale per output: the largest magnitude of each row is gathered first, so that all
    ranks have one scale for it, and whole numbers are added. The result is that of one process, to the last bit.

    Args:
        inner: the product with this rank's inputs.
        num_inputs: of all ranks.
    """

    def __init__(self, inner: CodeLinear, bias: Tensor | None, peers: Peers, num_inputs: int) -> None:
        super().__init__(inner, inner.out_features)
        self._peers, self._limit = peers, largest_summed_code(num_inputs)
        self._scales = inner.channel_scales()
        self._bias = None if bias is None else bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, this rank's inputs] -> [T, out] in x's type."""
        return self._product(x).to(x.dtype)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + forward(x), added in float32. residual: [T, out]."""
        return (self._product(x) + residual.float()).to(residual.dtype)

    def _product(self, x: Tensor) -> Tensor:
        x = x.float().contiguous()
        magnitudes = torch.stack(self._peers.exchange(x.abs().amax(-1))).amax(0)
        total = _total(self._peers.exchange(self.inner.sums(x, magnitudes, self._limit)))
        scale = torch.where(torch.isfinite(magnitudes), magnitudes / self._limit, torch.nan)
        y = total.float() * (scale[:, None] * self._scales)
        return y if self._bias is None else y + self._bias


def _total(parts: list[Tensor], bias: Tensor | None = None) -> Tensor:
    """The ranks' parts, added in their order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total if bias is None else total + bias


def summing(
    inner: Linear, bias: Tensor | None, peers: Peers, wide: torch.dtype, num_inputs: int
) -> SummingLinear | SummingCodes:
    """The layer that adds up what the ranks compute, as the weight's codes ask for it."""
    if isinstance(inner, (NativeLinear, QuantisedLinear)) and inner.has_channel_scales:
        return SummingCodes(inner, bias, peers, num_inputs)
    return SummingLinear(inner, bias, peers, wide)


class GatheredLogits:
    """The logits of the whole vocabulary on the leader, of which each rank computes a part.

    Args:
        widths: tokens of each rank, in the order of the vocabulary.
        wide: what logits are gathered in: float32, or float64 of a float64 model.
    """

    def __init__(self, peers: Peers, widths: list[int], wide: torch.dtype) -> None:
        self._peers, self._widths, self._wide = peers, widths, wide
        self._forwards = 0

    def of(self, part: Tensor, states: Tensor) -> Tensor:
        """[R, this rank's tokens] -> on the leader [R, V]; on others what they gave.

        states: [R, hidden] after the last norm, which every rank has computed. Now and then they are compared.

        Raises:
            RankError: they differ.
        """
        if self._forwards % COMPARED_EVERY == 0:
            self._compare(states)
        self._forwards += 1
        padded = F.pad(part.to(self._wide), (0, max(self._widths) - part.shape[-1])).contiguous()
        parts = self._peers.to_leader(padded)
        if parts is None:
            return part
        return torch.cat([each[:, :width] for each, width in zip(parts, self._widths, strict=True)], -1)

    def _compare(self, states: Tensor) -> None:
        own = zlib.crc32(states.contiguous().view(torch.uint8).numpy().tobytes())
        every = self._peers.to_leader(torch.tensor([own]))
        for rank, other in enumerate(every or ()):
            if int(other) != own:
                reason = f"Rank {rank} has computed other states after the last norm than rank 0."
                raise self._peers.break_off(reason, rank)


class GatheringLinear(WrappedLinear[Linear]):
    """The output layer as a linear layer whose outputs are gathered on the leader (`Linear`)."""

    def __init__(self, inner: Linear, gathered: GatheredLogits, out_features: int) -> None:
        super().__init__(inner, out_features)
        self._gathered = gathered

    def forward(self, x: Tensor) -> Tensor:
        """x: [R, in] -> [R, V] on the leader."""
        return self._gathered.of(self.inner.forward(x), x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + forward(x)."""
        return residual + self.forward(x)
