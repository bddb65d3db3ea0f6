"""Gates of mixtures: few outputs a row, and a sigmoid of them; a row's result does not depend on the other rows.

PyTorch computes a sigmoid on CPU by vectors, and what is left at the end of a tensor number by number; now and then the
two differ in the last bit. Which of them a row gets depends on the rows around it, unless the rows before it fill
whole vectors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from forerun.kernels.row_invariant_linear import PackedLinear

_ROWS = 32
"""Rows of each call of a router: PyTorch's loop over vectors takes 32 float32 numbers at a time, or 16."""


class SingleOutput(PackedLinear):
    """A product with one output, such as the gate of a shared expert.

    Its outputs do not lie one behind another, so that what follows is computed number by number for all rows.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., 1], a column of a wider tensor."""
        return super().forward(x).expand(*x.shape[:-1], 2).contiguous()[..., :1]


def is_router(module: nn.Module) -> bool:
    """Whether a module is one of Transformers' routers, which every family calls so."""
    return type(module).__name__.endswith("Router")


def call_in_blocks(router: nn.Module) -> None:
    """Have a router called, from now on, with blocks of 32 rows, the last one filled up with zeros.

    Args:
        router: [..., hidden] -> a tensor, or several, with a row for each of T rows. Called with more arguments, it
            computes as before.
    """
    compute = router.forward

    def forward(hidden_states: Tensor, *more: Any, **named: Any) -> Any:
        if more or named:
            return compute(hidden_states, *more, **named)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        count = len(rows)
        filled = torch.cat([rows, rows.new_zeros(-count % _ROWS, rows.shape[1])])
        blocks = [compute(block) for block in filled.view(-1, _ROWS, rows.shape[1]).unbind()]
        if isinstance(blocks[0], Tensor):
            return torch.cat(blocks)[:count]
        return tuple(torch.cat(parts)[:count] for parts in zip(*blocks, strict=True))

    router.forward = forward
