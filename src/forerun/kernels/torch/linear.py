"""Matrix products in PyTorch: packed for oneDNN, plain, several quantized weights joined, and a mixture's experts.

From MIN_ROWS rows up, packed products give the same bits for a row whatever the others are. They do not share the trap
of stock float32 products on CPU either, which take several times longer for 2-16 rows than for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forerun.kernels.block_weight import BlockWeight
from forerun.kernels.partition import MIN_ROWS
from forerun.kernels.quantize import QuantizedWeight, activation_limit
from forerun.kernels.torch.quantized_linear import QuantizedLinear

_AMX_ROWS = 32
"""Rows up to which oneDNN's bfloat16 products by matrix tiles (AMX) give a row the same bits whatever their number."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether oneDNN packs weights of this type on this device."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class PackedLinear(nn.Module):
    """y = x W^T + b, on CPU.

    Args:
        weight: [out, in], of a type that `can_pack` accepts. bias: [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self.bias = None if bias is None else bias.detach()
        by_tiles = weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
        self.max_rows = _AMX_ROWS if by_tiles else 2**62

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b. x: [..., in] -> [..., out]."""
        if x.shape[-2] > self.max_rows:
            return torch.cat([self.forward(part) for part in x.tensor_split(self._num_parts(x), -2)], -2)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + forward(x), in one pass. residual: [..., out]."""
        if x.shape[-2] > self.max_rows:
            count = self._num_parts(x)
            parts = zip(residual.tensor_split(count, -2), x.tensor_split(count, -2), strict=True)
            return torch.cat([self.add_to(part, rows) for part, rows in parts], -2)
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
        return y

    def rows(self, index: Tensor) -> Tensor:
        """Return rows of the weight, unpacking all of it. index: [n] int64 -> [n, in] float32."""
        return self.weight.to_dense()[index].float()

    def _num_parts(self, x: Tensor) -> int:
        """Return the number of parts of nearly equal size with at most max_rows rows each."""
        return -(-x.shape[-2] // self.max_rows)


class PlainLinear(nn.Module):
    """y = x W^T + b by PyTorch's own product. Whether a row's result depends on the other rows is up to the device.

    Args:
        weight: [out, in]. bias: [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b. x: [..., in] -> [..., out]."""
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + forward(x). residual: [..., out]."""
        return residual + F.linear(x, self.weight, self.bias)

    def rows(self, index: Tensor) -> Tensor:
        """Return rows of the weight. index: [n] int64 -> [n, in] float32."""
        return self.weight[index].float()


class JoinedLinear(nn.Module):
    """A product with several weights of different quantized formats, whose outputs are concatenated. All weights use
    the same quantized activations.

    Args:
        weights: each [out, in], with the same number of inputs. bias: [sum of outs] or None.
    """

    def __init__(self, weights: Sequence[QuantizedWeight | BlockWeight], bias: Tensor | None = None) -> None:
        super().__init__()
        quantized = [each.quantized() if isinstance(each, BlockWeight) else each for each in weights]
        self._counts = [weight.shape[0] for weight in weights]
        self.out_features = sum(self._counts)
        self.in_features = weights[0].shape[1]
        limit = min(activation_limit(weight) for weight in quantized)
        biases = [None] * len(weights) if bias is None else torch.split(bias, self._counts)
        self._parts = [QuantizedLinear(weight, each, limit) for weight, each in zip(quantized, biases, strict=True)]

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b. x: [..., in] -> [..., out] in x's type."""
        return torch.cat([part.forward(x) for part in self._parts], -1)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + forward(x), added in float32. residual: [..., out]."""
        residuals = torch.split(residual, self._counts, -1)
        return torch.cat([part.add_to(each, x) for part, each in zip(self._parts, residuals, strict=True)], -1)

    def rows(self, index: Tensor) -> Tensor:
        """Return rows of the weights, counted from one weight to the next. index: [n] int64 -> [n, in] float32."""
        result = torch.empty(len(index), self.in_features, device=index.device)
        first = 0
        for count, part in zip(self._counts, self._parts, strict=True):
            here = (index >= first) & (index < first + count)
            result[here] = part.rows(index[here] - first)
            first += count
        return result


class PackedExperts(nn.Module):
    """The gated experts of a mixture with packed weights, on CPU.

    An expert sees as many rows as were routed to it, so its products are padded to MIN_ROWS like all others.

    Args:
        gate_up: of each expert [2 I, H]. down: of each [H, I]. act_fn: of the gate.
    """

    def __init__(self, gate_up: Sequence[Tensor], down: Sequence[Tensor], act_fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_up = nn.ModuleList([PackedLinear(weight) for weight in gate_up])
        self.down = nn.ModuleList([PackedLinear(weight) for weight in down])
        self.act_fn = act_fn

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Add the experts in order. hidden_states: [T, H]; top_k_index, top_k_weights: [T, k] -> [T, H].

        The experts are read from top_k_index, which lies in the CPU's memory.
        """
        summed = torch.zeros_like(hidden_states)
        for expert in sorted(set(top_k_index.flatten().tolist())):
            rows, choice = torch.where(top_k_index == expert)
            padded = torch.cat([rows, rows[-1:].expand(MIN_ROWS - len(rows))]) if len(rows) < MIN_ROWS else rows
            gate, up = self.gate_up[expert](hidden_states[padded]).chunk(2, -1)
            out = self.down[expert](self.act_fn(gate) * up)[: len(rows)]
            summed.index_add_(0, rows, (out * top_k_weights[rows, choice, None]).to(summed.dtype))
        return summed
