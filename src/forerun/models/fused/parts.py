"""What latent attention, recurrences and mixtures of experts are made of, as data; `spec.py` says which layers have
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

MIXED = ("mixed", "mixed_key", "mixed_value")
"""Linear layers of a recurrent layer that give what is convolved: one module, or three, of queries, keys, values."""
RECURRENT_ROLES = (*MIXED, "mixed_gate", "beta", "decay", "mixed_out")
"""All linear layers of one, as csrc/forerun.h has them in `ForerunRecurrence`."""
EXPERT = ("expert_gate", "expert_up", "expert_down")
"""Linear layers of each expert but the one that every row is given to (`SHARED` of spec.py)."""
EXPERT_NORMS = ("expert_norm", "shared_norm", "mixed_norm")
"""Norms of rows as experts read them, of what the expert that every row is given to gives, and of what the others give;
other layers' experts read "mlp_norm", and "feed_norm" is behind the sum alone."""
_MOST_TAPS, _MOST_GROUPS = 16, 64
"""Of a convolution, and of experts, in the native kernels."""


@dataclass(frozen=True, slots=True)
class Latent:
    """What attention with latents is made of: of each position one latent, of which all heads make keys and values, and
    one rotated key, which they share.

    Its roles are "query", of the row, or of what "entry" gives behind "entry_norm"; and "latent", which gives the
    latent, behind "latent_norm", and the key. Each head of a query has first what is not rotated.

    Attributes:
        rank: numbers of the latent.
        value_width: of a head's value.
        entry_width: numbers that queries are made of; 0: they are made of the row.
        expansion: the module of a layer that makes of a latent each head's key, but for what is rotated, and value. Its
            weight stays numbers: one part is multiplied from the other side, and its groups of inputs would be others.
        eps: of both norms.
    """

    rank: int
    value_width: int
    entry_width: int = 0
    expansion: str = "self_attn.kv_b_proj"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if min(self.rank, self.value_width) < 1:
            raise ValueError(f"a latent of {self.rank} numbers, values of {self.value_width}")

    def rows(self, heads: int, width: int, rotated: int, order: Tensor | None) -> Tensor:
        """Return the rows of heads of this width with what is rotated, the last numbers in the files, first, int64.

        order: of what is rotated and more, as `DecoderSpec.head_order`.
        """
        turned = torch.arange(rotated) if order is None else order[:rotated]
        head = torch.cat([width - rotated + turned, torch.arange(width - rotated)])
        return (torch.arange(0, heads * width, width)[:, None] + head).reshape(-1)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """What the recurrent layers of a decoder are made of.

    Attributes:
        kind: "short_convolution", "delta_rule" or "state_space", as csrc/forerun.h defines them.
        num_taps: inputs of the convolution, that of the row itself included.
        channels: numbers that are convolved.
        heads, key_heads, key_width, value_width: of the states; 0 of a short convolution.
        heads_are_tiled: head h reads the key head h % key_heads, else h // (heads / key_heads).
        order: of queries, keys and values among the channels.
        numbers: names of parameters and modules in a layer: "taps" (a convolution), "rate" (the logarithm of -rate),
            "step_bias", "skip", "norm".
        unrounded: those of them that are float32 in a model of a narrower type.
        places: role -> the outputs of its module that are its: (start, count, stride, repeats) of each run. A role that
            is left out has all of them.
        norm_width: numbers that one norm is over; norms_each: the norm's weights are those of one head.
        gates_first: the norm is behind the gate. norm_eps: of it.
        beta_scale: of the sigmoid of beta. step_limits: the least and the largest step.
        scales: factors of what modules give for "query", "key" and "value", "gate" and "step", and "out".
    """

    kind: str
    num_taps: int
    channels: int
    numbers: Mapping[str, str]
    heads: int = 0
    key_heads: int = 1
    key_width: int = 0
    value_width: int = 0
    heads_are_tiled: bool = False
    order: tuple[str, str, str] = ("query", "key", "value")
    places: Mapping[str, tuple[tuple[int, int, int, int], ...]] = field(default_factory=dict)
    norm_width: int = 0
    unrounded: frozenset[str] = frozenset()
    norms_each: bool = True
    gates_first: bool = False
    norm_eps: float = 1e-6
    beta_scale: float = 1.0
    step_limits: tuple[float, float] = (0.0, float("inf"))
    scales: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.num_taps <= _MOST_TAPS:
            raise ValueError(f"a convolution of {self.num_taps} inputs")
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
        keys, values = self.key_heads * self.key_width, self.heads * self.value_width
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
        return (self.num_taps - 1) * self.channels + self.heads * self.key_width * -(-self.value_width // 16) * 16

    @property
    def record_size(self) -> int:
        """Return the numbers of a row's record in a layer."""
        return 2 * (self.channels + self.heads) if self.heads else self.channels

    def out_features(self, role: str, *, are_apart: bool) -> int:
        """Return the outputs of a linear layer, but of "mixed_out". are_apart: the roles MIXED have three modules."""
        if role in MIXED:
            return self.sizes[MIXED.index(role)] if are_apart else self.channels
        return self.wide if role == "mixed_gate" or not self.heads else self.heads

    def rows(self, role: str) -> Tensor | None:
        """Return the outputs of the module that are a role's, int64; None for all in order."""
        if role not in self.places:
            return None
        runs = [
            (start + stride * torch.arange(repeats)[:, None] + torch.arange(count)).reshape(-1)
            for start, count, stride, repeats in self.places[role]
        ]
        return torch.cat(runs)


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """What a token gives each layer besides its embedding: numbers of a table, and a product of the embedding behind a
    norm. The role "token_gate" reads the residual; its activation, times these numbers, is what "token_out" reads.

    Attributes:
        width: numbers for a layer. count: tokens of the table.
        table, product, norm: modules below `DecoderSpec.base`. The first two have the numbers for all layers.
    """

    width: int
    count: int
    table: str
    product: str
    norm: str


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of a feed-forward layer: a row is given to those of its largest scores.

    Attributes:
        count, top, width: experts, those that a row is given to, and the intermediate numbers of each.
        router: the module of a layer that scores them.
        modules: role of EXPERT -> the module of expert {}. A checkpoint may have all in one tensor, as Transformers.
        stacked: the module of Transformers that holds all of them. is_transposed: as [in, out], gate and up by turns.
        shared_width: intermediate numbers of the expert of all rows. shared_switch: what its sigmoid multiplies it by.
        bias: a parameter that is added to scores for the choice alone, and its shape.
        unrounded: the router is float32 in a model of a narrower type.
        scoring: "softmax", "sigmoid", or "sparsemixer" (arXiv 2409.12136): an expert's share is that of a softmax of
            the scores that are left and less by no more than `distance` times the larger one's size.
        groups, top_groups: of experts, from which alone they are taken; 0: from all.
        best: scores of a group that are added to choose it, 2 or 1.
        adds_to_one: the scores of the chosen are divided by their sum, or by least_sum. scale: of them.
        curve: "alpha" and the limit of the activation "clamped_swiglu".
        router_norm: a parameter [hidden] that, times hidden^-0.5, is the weight of a norm of what the router reads, the
            residual; None: it reads what experts do. share_scales: a parameter [count] of factors of the shares.
    """

    count: int
    top: int
    width: int
    router: str = "mlp.gate"
    modules: Mapping[str, str] = field(
        default_factory=lambda: {role: f"mlp.experts.{{}}.{role[7:]}_proj" for role in EXPERT}
    )
    stacked: str = "mlp.experts"
    is_transposed: bool = False
    shared_width: int = 0
    shared_switch: str | None = None
    bias: str | None = None
    bias_shape: tuple[int, ...] = ()
    unrounded: bool = False
    scoring: str = "softmax"
    distance: float = 0.0
    groups: int = 0
    top_groups: int = 0
    best: int = 2
    adds_to_one: bool = True
    least_sum: float = 0.0
    scale: float = 1.0
    curve: tuple[float, float] | None = None
    router_norm: str | None = None
    share_scales: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.top <= self.count or self.width < 1:
            raise ValueError(f"{self.top} of {self.count} experts of width {self.width}")
        if self.groups and (self.count % self.groups or not 1 <= self.top_groups <= self.groups <= _MOST_GROUPS):
            raise ValueError(f"{self.top_groups} of {self.groups} groups of {self.count} experts")
        if self.groups and self.top > self.count // self.groups * self.top_groups:
            raise ValueError(f"{self.top} experts of {self.top_groups} groups of {self.count // self.groups}")
