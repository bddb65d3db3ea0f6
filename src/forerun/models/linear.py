"""Linear layers whose result for a row does not depend on how many rows it is computed with.

On CPU, weights are packed once for oneDNN. Packed products give the same bits for a row whatever its company (from
MIN_ROWS rows up), and do not share the trap of stock float32 products there, which take several times longer for 2-16
rows than for one. Elsewhere, and in float64, the stock product is used, and `models/exactness.py` says what that costs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forerun.config import MIN_ROWS


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN packs weights of this type here."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


_AMX_ROWS = 32
"""Rows up to which oneDNN's bfloat16 products by matrix tiles (AMX) give a row the same bits whatever their number."""


class Linear(nn.Module):
    """y = x W^T + b, optionally plus a residual in the same pass.

    Args:
        weight: [out, in]. bias: [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = can_pack(weight.dtype, weight.device)
        weight = weight.detach()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self.packed else weight
        self.bias = None if bias is None else bias.detach()
        by_tiles = self.packed and weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
        self.max_rows = _AMX_ROWS if by_tiles else 2**62

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out]."""
        if self.packed and x.shape[-2] > self.max_rows:
            return torch.cat([self.forward(part) for part in x.tensor_split(self._num_parts(x), -2)], -2)
        if self.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return y
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + forward(x). residual: [..., out]."""
        if self.packed and x.shape[-2] > self.max_rows:
            count = self._num_parts(x)
            parts = zip(residual.tensor_split(count, -2), x.tensor_split(count, -2), strict=True)
            return torch.cat([self.add_to(part, rows) for part, rows in parts], -2)
        if self.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
            return y
        return residual + F.linear(x, self.weight, self.bias)

    def _num_parts(self, x: Tensor) -> int:
        """Parts of nearly equal size, none of them small, of at most max_rows rows."""
        return -(-x.shape[-2] // self.max_rows)


class Experts(nn.Module):
    """A mixture's experts with packed weights, in place of Transformers' modules that keep them as 3-D parameters.

    An expert sees as many rows as were routed to it, so its products are padded to MIN_ROWS like all others.

    Args:
        module: gate_up_proj [E, 2 I, H], down_proj [E, H, I], act_fn, num_experts.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.gate_up = nn.ModuleList([Linear(weight) for weight in module.gate_up_proj])
        self.down = nn.ModuleList([Linear(weight) for weight in module.down_proj])
        self.act_fn = module.act_fn

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states: [T, H]; top_k_index, top_k_weights: [T, k] -> [T, H], experts added in order."""
        mixed = torch.zeros_like(hidden_states)
        for expert in sorted(set(top_k_index.flatten().tolist())):
            rows, choice = torch.where(top_k_index == expert)
            padded = torch.cat([rows, rows[-1:].expand(MIN_ROWS - len(rows))]) if len(rows) < MIN_ROWS else rows
            gate, up = self.gate_up[expert](hidden_states[padded]).chunk(2, -1)
            out = self.down[expert](self.act_fn(gate) * up)[: len(rows)]
            mixed.index_add_(0, rows, (out * top_k_weights[rows, choice, None]).to(mixed.dtype))
        return mixed


# Transformers' modules with the plain gated form; others (biases, clamps) keep their own and report what that costs
_PLAIN_EXPERTS = {"MixtralExperts", "Qwen2MoeExperts", "Qwen3MoeExperts", "OlmoeExperts"}


def pack_module(module: Any) -> None:
    """Replace, in place, every layer below `module` that can be packed: nn.Linear, GPT-2's Conv1D, plain experts."""
    from transformers.pytorch_utils import Conv1D

    for name, child in list(module.named_children()):
        parameter = next(child.parameters(), None)
        packable = parameter is not None and can_pack(parameter.dtype, parameter.device)
        if packable and type(child) is nn.Linear:
            setattr(module, name, Linear(child.weight, child.bias))
        elif packable and type(child) is Conv1D:
            setattr(module, name, Linear(child.weight.T, child.bias))
        elif packable and type(child).__name__ in _PLAIN_EXPERTS:
            setattr(module, name, Experts(child))
        else:
            pack_module(child)
