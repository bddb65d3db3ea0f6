"""Matrix products in PyTorch: packed for oneDNN, plain, with weights of 8 or 4 bits, several of these joined, and a
mixture's experts.

From MIN_ROWS rows up, packed products give the same bits for a row whatever the others are. They do not share the trap
of stock float32 products on CPU either, which take several times longer for 2-16 rows than for one.

Quantized weights have integer sums, which have no order, scaled in a fixed order. Activations are quantized to whole
numbers of 16 bits, with one scale per row, or of 8 bits, with one scale per group of 32 inputs. A row's result depends
on that row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forerun.kernels.block_weight import BlockWeight
from forerun.kernels.partition import MIN_ROWS
from forerun.kernels.quantize import GROUP, QuantizedWeight, activation_limit, quantize_symmetric

_PART = 1 << 21
"""Sums of groups held together."""


class QuantizedLinear(nn.Module):
    """y = x W^T + b. Inputs and results are of x's float type; all between is float32.

    With one scale per channel, y = float(sum of integer products) * (scale of x * scale of W) + b. By groups, in order,
    y = 0; y += scale of W * float(sum of integer products); with minima, y += minimum * float(sum of quantized x);
    after the last group, y *= scale of x; y += b.

    With activations of 8 bits, by groups, y += float(sum of integer products) * scale of W * scale of x; with minima,
    y += minimum * (scale of x * float(sum of quantized x)); one scale per channel is multiplied after the last group.
    Groups of 16 inputs share the scale of x by twos.

    Nothing is fused. A row with NaN or infinity gives NaN.

    Integers are multiplied in float64, which holds every sum exactly: eight bytes per number of the weight, from the
    first product on.

    Args:
        weight: [out, in]. bias: [out] or None.
        limit: of quantized activations, if they are shared with another weight; None: that of this weight.
    """

    def __init__(
        self, weight: QuantizedWeight | BlockWeight, bias: Tensor | None = None, limit: int | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight = weight.quantized() if isinstance(weight, BlockWeight) else weight
        self.bias = None if bias is None else bias.detach().float()
        self._limit = activation_limit(weight) if limit is None else limit

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b. x: [..., in] -> [..., out]."""
        return self._product(x).to(x.dtype)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + forward(x), added in float32. residual: [..., out]."""
        return (self._product(x) + residual.float()).to(residual.dtype)

    def rows(self, index: Tensor) -> Tensor:
        """Return dequantized rows of the weight. index: [n] int64 -> [n, in] float32."""
        return self.weight.rows(index).dequantize(torch.float32)

    def _product(self, x: Tensor) -> Tensor:
        """Return the product in float32, [..., in] -> [..., out]."""
        rows = x.reshape(-1, self.in_features).float()
        if self.weight.activation_bits == 8:
            y = self._by_groups(rows)
            y = y if self.weight.group is not None else y * self.weight.scale[:, 0]
            return self._finished(y, x)
        quantized, scale = quantize_symmetric(rows, self._limit)
        if self.weight.group is None:
            sums = F.linear(quantized.double(), self._channel_weight).float()
            y = sums * (scale * self.weight.scale[:, 0])
        else:
            y = self._by_groups(quantized.double()) * scale
        return self._finished(y, x)

    def _finished(self, y: Tensor, x: Tensor) -> Tensor:
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], self.out_features)

    @cached_property
    def _channel_weight(self) -> Tensor:
        """Return [out, in] quantized values minus their zero."""
        return self.weight.centred()

    def _by_groups(self, rows: Tensor) -> Tensor:
        """Return the sum over groups. rows: [n, in], quantized float64 of 16 bits, or float32 to bring to 8 bits."""
        if len(rows) == 0:
            return rows.new_empty(0, self.out_features, dtype=torch.float32)
        parts: tuple[Tensor, ...] = rows.split(max(1, _PART // (self.out_features * self._group_operands[0].shape[0])))  # type: ignore[no-untyped-call]
        return torch.cat([self._of_groups(part) for part in parts])

    def _of_groups(self, rows: Tensor) -> Tensor:
        operand, scale, minimum = self._group_operands
        groups = F.pad(rows, (0, -rows.shape[1] % GROUP)).view(len(rows), -1, GROUP).transpose(0, 1)
        row_scale: Tensor | None = None
        if self.weight.activation_bits == 8:
            groups, row_scale = quantize_symmetric(groups)
            row_scale = row_scale.repeat_interleave(GROUP // operand.shape[1], 0)
        groups = groups.double().reshape(*groups.shape[:2], -1, operand.shape[1]).transpose(1, 2).flatten(0, 1)
        terms = torch.bmm(groups, operand).float()
        terms = terms if scale is None else terms * scale
        sums = groups.sum(-1, keepdim=True).float()
        if row_scale is not None:
            terms = terms * row_scale
            sums = row_scale * sums
        offsets = None if minimum is None else minimum * sums
        total = torch.zeros_like(terms[0])
        for index, term in enumerate(terms):
            total += term
            if offsets is not None:
                total += offsets[index]
        return total

    @cached_property
    def _group_operands(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return [groups, 32 or 16, out] quantized values minus their zero, and [groups, 1, out] scales and minima,
        where these are by group; those of larger groups are repeated."""
        weight = self.weight
        group = min(weight.group or GROUP, GROUP)
        quantized = F.pad(weight.centred(), (0, -self.in_features % GROUP))
        operand = quantized.view(self.out_features, -1, group).permute(1, 2, 0).contiguous()
        scale, minimum = (
            None
            if each is None or weight.group is None
            else each.float().T.repeat_interleave(weight.group // group, 0)[: len(operand), None].contiguous()
            for each in (weight.scale, weight.minimum)
        )
        return operand, scale, minimum


class QuantizedEmbedding:
    """A quantized table of [V, hidden] numbers whose rows are dequantized when it is indexed with token ids.

    Args:
        weight: [V, hidden]. dtype: of the rows that it gives.
    """

    def __init__(self, weight: QuantizedWeight | BlockWeight, dtype: torch.dtype) -> None:
        self.weight = weight
        self.dtype = dtype

    @property
    def device(self) -> torch.device:
        """Return the device of the quantized values."""
        return self.weight.device

    def __getitem__(self, token_ids: Tensor) -> Tensor:
        """Return dequantized rows. token_ids: [n] int64 -> [n, hidden]."""
        return self.weight.rows(token_ids).dequantize(self.dtype)


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
