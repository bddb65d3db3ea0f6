"""A mixture's experts, as products whose result for a row does not depend on the other rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from forerun.kernels.partition import MIN_ROWS
from forerun.kernels.row_invariant_linear import PackedLinear


class PackedExperts(nn.Module):
    """Gated experts with packed weights, on CPU.

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
        """hidden_states: [T, H]; top_k_index, top_k_weights: [T, k] -> [T, H], experts added in order.

        Which experts are asked is read from top_k_index: it lies in the CPU's memory.
        """
        mixed = torch.zeros_like(hidden_states)
        for expert in sorted(set(top_k_index.flatten().tolist())):
            rows, choice = torch.where(top_k_index == expert)
            padded = torch.cat([rows, rows[-1:].expand(MIN_ROWS - len(rows))]) if len(rows) < MIN_ROWS else rows
            gate, up = self.gate_up[expert](hidden_states[padded]).chunk(2, -1)
            out = self.down[expert](self.act_fn(gate) * up)[: len(rows)]
            mixed.index_add_(0, rows, (out * top_k_weights[rows, choice, None]).to(mixed.dtype))
        return mixed
