"""Recurrent layers in PyTorch, row by row: what the native kernels compute (csrc/kernels/recurrence.h)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.kernels.torch.elementwise import rms_norm, silu
from forerun.kv_cache.recurrent_state import RowStates
from forerun.models.attention.base import PackedRows
from forerun.models.linear import Linear
from forerun.models.spec.recurrence import RECURRENT_ROLES, Recurrence

_EPS = 1e-6
"""Of the length of queries and keys."""


class RecurrentLayer:
    """The recurrence of one layer.

    Args:
        index: of the layer.
        numbers: of `numbers_of`.
        linears: by role, of RECURRENT_ROLES.
        dtype: to compute in.

    Attributes:
        numbers: in that type.
        out_scale: of what the product behind it gives.
    """

    def __init__(
        self, shape: Recurrence, index: int, numbers: dict[str, Tensor], linears: dict[str, Linear], dtype: torch.dtype
    ) -> None:
        self._shape = shape
        self._index = index
        self._dtype = dtype
        self._linears = linears
        self.out_scale = shape.scale("out")
        self.numbers = {name: each.to(dtype) for name, each in numbers.items()}
        self._eps = torch.tensor(shape.norm_eps, dtype=dtype, device=numbers["conv1d"].device)

    def forward(self, h: Tensor, packed: Sequence[PackedRows]) -> Tensor:
        """Return what the product behind the recurrence reads, [T, wide] in the type to compute in.

        Args:
            h: [T, hidden], normed rows. Those beyond the packed ones are padding, whose result is not read.
        """
        shape = self._shape
        linears = {role: self._linears[role] for role in RECURRENT_ROLES[:-1] if role in self._linears}
        given = {role: linear.forward(h).to(self._dtype) for role, linear in linears.items()}
        conv_input = given["in_proj_qkv"] if shape.heads else given["in_proj_qkv"] * given["in_proj_b"]
        read = torch.zeros(len(h), shape.wide, dtype=self._dtype, device=h.device)
        for rows in packed:
            states = rows.cache.state
            first = rows.first - rows.start
            assert isinstance(states, RowStates)
            for row in range(rows.start, rows.end):
                parent = rows.cache.scratch_parents[first + row]
                state = states.before(self._index, parent) or self._initial(h.device)
                rates = () if not shape.heads else self._rates({role: each[row] for role, each in given.items()})
                read[row], after = self._step(state, conv_input[row], *rates)
                states.after(self._index, first + row, after)
        gate = given["in_proj_z"]
        return self._gated(read, gate) if shape.heads else read * gate

    def _initial(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the state before the first token: inputs [conv_kernel - 1, channels] and matrices [heads, keys,
        values]."""
        shape = self._shape
        inputs = torch.zeros(shape.conv_kernel - 1, shape.channels, dtype=self._dtype, device=device)
        return inputs, inputs.new_zeros(shape.heads, shape.key_width, shape.value_width)

    def _rates(self, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return what a row keeps of each head's state, and how much it writes, [heads]."""
        shape = self._shape
        step = F.softplus(given["in_proj_a"] * shape.scale("step") + self.numbers["dt_bias"]).clamp(
            *shape.time_step_limit
        )
        decay = (self.numbers["A_log"] * step).exp()
        return decay, given["in_proj_b"].sigmoid() * shape.beta_scale if "in_proj_b" in given else step

    def _step(
        self, state: tuple[Tensor, ...], conv_input: Tensor, decay: Tensor | None = None, beta: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what a row reads, [wide], and the state after it."""
        shape = self._shape
        (inputs, matrix) = state
        inputs = torch.cat([inputs, conv_input[None]])
        after = (inputs * self.numbers["conv1d"]).sum(0)
        after = after + self.numbers["conv1d_bias"] if "conv1d_bias" in self.numbers else after
        if decay is None or beta is None:
            return after, (inputs[1:], matrix)
        after = silu(after)
        starts = shape.starts
        keys = {name: after[starts[name] :][: shape.key_heads * shape.key_width] for name in ("query", "key")}
        query, key = (part.view(shape.key_heads, shape.key_width) for part in (keys["query"], keys["key"]))
        value = after[starts["value"] :][: shape.heads * shape.value_width].view(shape.heads, shape.value_width)
        if shape.kind == "delta_rule":
            query, key = (part * (part.square().sum(-1, keepdim=True) + _EPS).rsqrt() for part in (query, key))
            query = query * shape.key_width**-0.5
        query = query[shape.key_of_head]
        key = key[shape.key_of_head]
        matrix = matrix * decay[:, None, None]
        written = value
        if shape.kind == "delta_rule":
            written = value - (matrix * key[:, :, None]).sum(1)
        matrix = matrix + key[:, :, None] * (written * beta[:, None])[:, None]
        read = (matrix * query[:, :, None]).sum(1)
        if "D" in self.numbers:
            read = read + value * self.numbers["D"][:, None]
        return read.reshape(-1), (inputs[1:], matrix)

    def _gated(self, read: Tensor, gate: Tensor) -> Tensor:
        """Return the rows that the states gave, gated and normed, [T, wide]."""
        shape = self._shape
        gate = silu(gate * self._shape.scale("gate"))
        if shape.gates_first or "norm" not in self.numbers:
            read = read * gate
        if "norm" not in self.numbers:
            return read
        weight = self.numbers["norm"].view(-1, shape.normed_width)
        parts = read.view(len(read), -1, shape.normed_width)
        read = rms_norm(parts, torch.ones_like(weight[0]), self._eps).mul_(weight).reshape(read.shape)
        return read if shape.gates_first else read * gate
