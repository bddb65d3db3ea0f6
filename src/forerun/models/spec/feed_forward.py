"""Feed-forward layers: dense ones (`FeedForward`), and mixtures of experts (`Experts`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from forerun.models.spec.attention import rows_among
from forerun.models.spec.part import Part

FEED = frozenset({"gate", "up", "down"})
LLAMA_FEED = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
SHARED = ("shared_gate", "shared_up", "shared_down")
"""Of an expert that every row is given to; in the native kernels, the layer's own."""
EXPERT = ("expert_gate", "expert_up", "expert_down")
"""Linear layers of each expert but that one."""
EXPERT_NORMS = ("expert_norm", "shared_norm", "routed_norm")
"""Norms of rows as experts read them, of what the expert that every row is given to gives, and of what the others give;
other layers' experts read "mlp_norm", and "feed_norm" is behind the sum alone."""
_MOST_GROUPS = 64
"""Of experts in the native kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyFeedForward(Part):
    """What both kinds of feed-forward layer have.

    Attributes:
        activation: "silu", "gelu", "gelu_tanh", "relu2", "relu", "xielu" or "clamped_swiglu".
        activation_scale: of what it reads.
        out_scale: of what the layer adds.
    """

    activation: str = "silu"
    activation_scale: float = 1.0
    out_scale: float = 1.0

    def width(self, role: str) -> int:
        """Return the intermediate numbers of a role."""
        raise NotImplementedError

    def out_features(self, role: str) -> int:
        """Return the outputs of a linear layer (`Part.out_features`)."""
        return 0 if role.endswith("down") else self.width(role)

    def in_features(self, role: str) -> int:
        """Return the inputs of a linear layer (`Part.in_features`)."""
        return self.width(role) if role.endswith("down") else 0

    def rows(self, role: str, *, in_pairs: bool) -> Tensor | None:
        """Return the rows of the module's weight that are a role's (`Part.rows`)."""
        sharing = self.sharing(role)
        return None if len(sharing) == 1 else rows_among(sharing, role, dict.fromkeys(sharing, self.width(role)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward(AnyFeedForward):
    """A dense feed-forward layer.

    Attributes:
        intermediate_size: intermediate numbers.
        xielu: the module of the layer with the numbers of that activation.
    """

    ROLES: ClassVar[tuple[str, ...]] = ("gate", "up", "down")
    intermediate_size: int
    xielu: str | None = None

    def width(self, role: str) -> int:
        """Return the intermediate numbers of a role (`AnyFeedForward.width`)."""
        return self.intermediate_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(AnyFeedForward):
    """A mixture of experts: a row is given to those of its largest scores.

    Attributes:
        num_experts, num_experts_per_tok, moe_intermediate_size: experts, those that a row is given to, and the
            intermediate numbers of each.
        router: the module of a layer that scores them.
        experts: role of EXPERT -> the module of expert {}. A checkpoint may have all in one tensor, as Transformers.
        stacked: the module of Transformers that holds all of them. is_transposed: as [in, out], gate and up by turns.
        shared_intermediate_size: intermediate numbers of the expert of all rows. shared_expert_gate: what its sigmoid
            multiplies it by.
        e_score_correction_bias: a parameter that is added to scores for the choice alone, and its shape, if that is not
            [num_experts].
        unrounded: the router is float32 in a model of a narrower type.
        scoring: "softmax", "sigmoid", or "sparsemixer" (arXiv 2409.12136): an expert's weight is that of a softmax of
            the scores that are left and less by no more than `distance` times the larger one's size.
        n_group, topk_group: of experts, from which alone they are taken; 0: from all.
        scores_of_group: scores of a group that are added to choose it, 2 or 1.
        norm_topk_prob: the routing weights, which are scores, are divided by their sum, or by least_sum.
        routed_scaling_factor: of the routing weights.
        swiglu: "alpha" and the limit of the activation "clamped_swiglu".
        router_norm: a parameter [hidden] that, times hidden^-0.5, is the weight of a norm of what the router reads, the
            residual; None: it reads what experts do. per_expert_scale: a parameter [num_experts] of factors of the
            routing weights.
    """

    ROLES: ClassVar[tuple[str, ...]] = SHARED
    NORMS: ClassVar[tuple[str, ...]] = EXPERT_NORMS
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    router: str = "mlp.gate"
    experts: Mapping[str, str] = field(
        default_factory=lambda: {role: f"mlp.experts.{{}}.{role[7:]}_proj" for role in EXPERT}
    )
    stacked: str = "mlp.experts"
    is_transposed: bool = False
    shared_intermediate_size: int = 0
    shared_expert_gate: str | None = None
    e_score_correction_bias: str | None = None
    bias_shape: tuple[int, ...] = ()
    unrounded: bool = False
    scoring: str = "softmax"
    distance: float = 0.0
    n_group: int = 0
    topk_group: int = 0
    scores_of_group: int = 2
    norm_topk_prob: bool = True
    least_sum: float = 0.0
    routed_scaling_factor: float = 1.0
    swiglu: tuple[float, float] | None = None
    router_norm: str | None = None
    per_expert_scale: str | None = None

    def __post_init__(self) -> None:
        count = self.num_experts
        top = self.num_experts_per_tok
        groups = self.n_group
        if not 1 <= top <= count or self.moe_intermediate_size < 1:
            raise ValueError(f"{top} of {count} experts of width {self.moe_intermediate_size}")
        if groups and (count % groups or not 1 <= self.topk_group <= groups <= _MOST_GROUPS):
            raise ValueError(f"{self.topk_group} of {groups} groups of {count} experts")
        if groups and top > count // groups * self.topk_group:
            raise ValueError(f"{top} experts of {self.topk_group} groups of {count // groups}")

    def width(self, role: str) -> int:
        """Return the intermediate numbers of a role (`AnyFeedForward.width`)."""
        return self.moe_intermediate_size if role in EXPERT else self.shared_intermediate_size

    def module(self, role: str, expert: int = 0) -> str:
        """Return the module of a role (`Part.module`)."""
        return self.experts[role].format(expert) if role in EXPERT else self.modules[role]

    def sharing(self, role: str) -> list[str]:
        """Return the roles whose outputs a role's module has (`Part.sharing`)."""
        named = self.experts if role in EXPERT else self.modules
        return [each for each in (*SHARED, *EXPERT) if named.get(each) == named[role]]

    @property
    def expert_modules(self) -> list[str]:
        """Return the modules of all experts, those of one after those of another."""
        paths = dict.fromkeys(self.experts.values())
        return [path.format(index) for index in range(self.num_experts) for path in paths]
