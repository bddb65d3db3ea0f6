"""Recurrent layers: short convolutions, the gated delta rule, state spaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from forerun.models.spec.part import Part

IN_PROJ = ("in_proj_qkv", "in_proj_k", "in_proj_v")
"""Linear layers of a recurrent layer that give what is convolved: one module, or three, of queries, keys, values."""
RECURRENT_ROLES = (*IN_PROJ, "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
"""All linear layers of one: of what is convolved, of the gate, of what is written, of what is kept, and of the
result."""
_MAX_CONV_KERNEL = 16
"""Of a convolution in the native kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence(Part):
    """What a recurrent layer is made of.

    Attributes:
        kind: "short_convolution", "delta_rule" or "state_space", as csrc/forerun.h defines them.
        conv_kernel: inputs of the convolution, that of the row itself included.
        channels: numbers that are convolved.
        heads, key_heads, key_width, value_width: of the states; 0 of a short convolution.
        heads_are_tiled: head h reads the key head h % key_heads, else h // (heads / key_heads).
        order: of queries, keys and values among the channels.
        parameters: names in a layer of "conv1d" (a module), "A_log" (the logarithm of what decays), "dt_bias", "D" and
            "norm" (a module).
        unrounded: those of them that are float32 in a model of a narrower type. has_conv_bias: "conv1d" has one.
        places: role -> the outputs of its module that are its: (start, count, stride, repeats) of each run. A role that
            is left out has all of them.
        normed_width: numbers that one norm is over; norms_each: the norm's weights are those of one head.
        gates_first: the norm is behind the gate. norm_eps: of it.
        beta_scale: of the sigmoid of beta. time_step_limit: the least and the largest step.
        scales: factors of what modules give for "query", "key" and "value", "gate" and "step", and "out".
    """

    ROLES: ClassVar[tuple[str, ...]] = RECURRENT_ROLES
    kind: str
    conv_kernel: int
    channels: int
    parameters: Mapping[str, str]
    heads: int = 0
    key_heads: int = 1
    key_width: int = 0
    value_width: int = 0
    heads_are_tiled: bool = False
    order: tuple[str, str, str] = ("query", "key", "value")
    places: Mapping[str, tuple[tuple[int, int, int, int], ...]] = field(default_factory=dict)
    normed_width: int = 0
    unrounded: frozenset[str] = frozenset()
    has_conv_bias: bool = False
    norms_each: bool = True
    gates_first: bool = False
    norm_eps: float = 1e-6
    beta_scale: float = 1.0
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    scales: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.conv_kernel <= _MAX_CONV_KERNEL:
            raise ValueError(f"a convolution of {self.conv_kernel} inputs")
        if self.heads % self.key_heads or (self.heads and min(self.key_heads, self.key_width, self.value_width) < 1):
            raise ValueError(f"{self.heads} heads, {self.key_heads} key heads, {self.key_width} x {self.value_width}")

    @property
    def wide(self) -> int:
        """Return the numbers that a row reads from its state."""
        return self.heads * self.value_width or self.channels

    @property
    def key_of_head(self) -> Tensor:
        """Return the key head that each head reads, [heads] int64."""
        heads = torch.arange(self.heads)
        return heads % self.key_heads if self.heads_are_tiled else heads // (self.heads // self.key_heads)

    @property
    def sizes(self) -> list[int]:
        """Return the channels of queries, keys and values, in their order."""
        keys = self.key_heads * self.key_width
        values = self.heads * self.value_width
        return [values if name == "value" else keys for name in self.order]

    @property
    def starts(self) -> dict[str, int]:
        """Return the first channel of queries, keys and values."""
        return {name: sum(self.sizes[:place]) for place, name in enumerate(self.order)}

    def scale(self, name: str) -> float:
        """Return one of `scales`."""
        return self.scales.get(name, 1.0)

    @property
    def channel_scales(self) -> Tensor:
        """Return the factors of the channels, [channels] float64."""
        scales = torch.tensor([self.scale(name) for name in self.order], dtype=torch.float64)
        return scales.repeat_interleave(torch.tensor(self.sizes))

    @property
    def state_size(self) -> int:
        """Return the numbers of a layer's state; values stand in blocks of 16."""
        return (self.conv_kernel - 1) * self.channels + self.heads * self.key_width * -(-self.value_width // 16) * 16

    @property
    def record_size(self) -> int:
        """Return the numbers of a row's record in a layer."""
        return 2 * (self.channels + self.heads) if self.heads else self.channels

    def out_features(self, role: str) -> int:
        """Return the outputs of a linear layer (`Part.out_features`)."""
        if role == "out_proj":
            return 0
        if role in IN_PROJ:
            return self.sizes[IN_PROJ.index(role)] if IN_PROJ[1] in self.modules else self.channels
        return self.wide if role == "in_proj_z" or not self.heads else self.heads

    def in_features(self, role: str) -> int:
        """Return the inputs of a linear layer (`Part.in_features`)."""
        return self.wide if role == "out_proj" else 0

    def rows(self, role: str, *, in_pairs: bool) -> Tensor | None:
        """Return the outputs of the module that are a role's (`Part.rows`)."""
        if role not in self.places:
            return None
        runs = [
            (start + stride * torch.arange(repeats)[:, None] + torch.arange(count)).reshape(-1)
            for start, count, stride, repeats in self.places[role]
        ]
        return torch.cat(runs)
