"""A layer of a decoder: its parts, and what is around them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from forerun.models.spec.attention import AnyAttention
from forerun.models.spec.feed_forward import EXPERT, AnyFeedForward, Experts
from forerun.models.spec.part import Part
from forerun.models.spec.recurrence import Recurrence

LLAMA_NORMS = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
LAYER_NORMS = ("input_norm", "attention_norm", "mlp_norm", "feed_norm")
"""Norms of a layer: before attention or recurrence, of what they add, and the same of the feed-forward layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerInput(Part):
    """What a layer makes of the inputs that tokens give it besides their embeddings (`PerLayerInputs`).

    "per_layer_input_gate" reads the residual; its activation, times these numbers, is what "per_layer_projection"
    reads.

    Attributes:
        width: numbers of such an input.
        activation: as of `AnyFeedForward`.
    """

    ROLES: ClassVar[tuple[str, ...]] = ("per_layer_input_gate", "per_layer_projection")
    NORMS: ClassVar[tuple[str, ...]] = ("post_per_layer_input_norm",)
    width: int
    activation: str

    def out_features(self, role: str) -> int:
        """Return the outputs of a linear layer (`Part.out_features`)."""
        return self.width if role == "per_layer_input_gate" else 0

    def in_features(self, role: str) -> int:
        """Return the inputs of a linear layer (`Part.in_features`)."""
        return self.width if role == "per_layer_projection" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """A layer.

    Attributes:
        hidden: numbers of the residual.
        attention, recurrence, feed_forward, per_layer_input: its parts; None: it has none. With attention and a
            recurrence, both read the same rows.
        norms: of LAYER_NORMS, role -> module.
        is_parallel: attention and feed-forward layer read, and add to, the same residual.
        is_transposed: linear layers have weights [in, out].
        scalar: the parameter, [1], that what comes out of the layer is multiplied by; None: there is none.
    """

    hidden: int
    attention: AnyAttention | None = None
    recurrence: Recurrence | None = None
    feed_forward: AnyFeedForward | None = None
    per_layer_input: PerLayerInput | None = None
    norms: Mapping[str, str] = field(default_factory=lambda: LLAMA_NORMS)
    is_parallel: bool = False
    is_transposed: bool = False
    scalar: str | None = None

    @property
    def parts(self) -> list[Part]:
        """Return its parts."""
        found = (self.recurrence, self.attention, self.feed_forward, self.per_layer_input)
        return [part for part in found if part is not None]

    @property
    def experts(self) -> Experts | None:
        """Return its mixture of experts."""
        return self.feed_forward if isinstance(self.feed_forward, Experts) else None

    @property
    def roles(self) -> list[str]:
        """Return its linear layers, but for those of single experts."""
        return [role for part in self.parts for role in part.roles]

    @property
    def biases(self) -> frozenset[str]:
        """Return the roles with a bias."""
        return frozenset[str]().union(*(part.biases for part in self.parts))

    def part_of(self, role: str) -> Part:
        """Return the part that has a linear layer or a norm."""
        if role in EXPERT and self.feed_forward is not None:
            return self.feed_forward
        return next(part for part in self.parts if role in part.modules)

    def module(self, role: str, expert: int = 0) -> str:
        """Return the module of a linear layer or a norm. expert: whose, of EXPERT."""
        return self.norms[role] if role in self.norms else self.part_of(role).module(role, expert)

    @property
    def all_norms(self) -> list[str]:
        """Return its norms, but for that of a recurrence."""
        around = [role for role in LAYER_NORMS if role in self.norms]
        return [*around, *(role for part in self.parts for role in part.norms)]

    def out_features(self, role: str) -> int:
        """Return the outputs of a linear layer."""
        return self.part_of(role).out_features(role) or self.hidden

    def in_features(self, role: str) -> int:
        """Return the inputs of a linear layer."""
        return self.part_of(role).in_features(role) or self.hidden

    def norm_width(self, role: str) -> int:
        """Return the numbers that a norm is over."""
        return self.hidden if role in self.norms else self.part_of(role).norm_width(role) or self.hidden

    def norm_order(self, role: str, *, in_pairs: bool) -> Tensor | None:
        """Return the order of the weights of a norm (`Part.norm_order`)."""
        return None if role in self.norms else self.part_of(role).norm_order(role, in_pairs=in_pairs)

    def weight(self, module: Any) -> Tensor:
        """Return the weight of a linear module, [out, in]."""
        found: Tensor = module.weight
        return found.T if self.is_transposed else found

    def matrices(self) -> Iterator[str]:
        """Yield the modules whose weights can be quantized."""
        yield from map(self.module, self.roles)
        yield from () if self.experts is None else self.experts.expert_modules
