"""Attention: with keys and values of each head (`Attention`), or made of latents (`LatentAttention`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from forerun.models.spec.part import Part

QKV = frozenset({"query", "key", "value", "attention_gate"})
ATTENTION = QKV | {"out"}
LLAMA_ATTENTION = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
}
HEAD_NORMS = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
GATED_QUERY = {"attention_gate": "self_attn.q_proj"}
"""Of attention whose result is multiplied by a sigmoid: each head has its query and the gate side by side."""


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotation of queries and keys.

    Attributes:
        parameters: as a configuration's `rope_parameters` has them.
        rotated: numbers of each head that are rotated.
        layer_type: of the layers that it is for, as configurations name them; None: of all.
        turns_back: angles are negative.
    """

    parameters: Mapping[str, Any]
    rotated: int
    layer_type: str | None = None
    turns_back: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyAttention(Part):
    """What both kinds of attention have.

    Attributes:
        num_heads: of queries. num_kv_heads: of keys and values. head_dim: numbers of a query.
        scale: of scores.
        rope: the place of its rotation in `DecoderSpec.ropes`; None: there is none.
        rotated: numbers of each head that are rotated.
        is_interleaved: numbers 2i and 2i + 1 are rotated together, not i and i + rotated / 2.
        window: positions that a row sees; None: all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: int | None = 0
    rotated: int
    is_interleaved: bool = False
    window: int | None = None

    @property
    def cached_widths(self) -> tuple[int, int]:
        """Return the numbers of a key and of a value as they are kept."""
        return self.head_dim, self.head_dim

    def head_order(self, *, in_pairs: bool) -> Tensor | None:
        """Return the order of a head's numbers, int64 [head_dim], as `rows`; None for that of the files."""
        if in_pairs == self.is_interleaved:
            return None
        half = self.rotated // 2
        places = torch.arange(self.head_dim)
        turned = places[: self.rotated].view(2, half).T if in_pairs else places[: self.rotated].view(half, 2).T
        return torch.cat([turned.reshape(-1), places[self.rotated :]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(AnyAttention):
    """Attention with keys and values of each key head.

    Without the role "value", values are what the role "key" gives, before its norm.

    Attributes:
        qkv_groups: groups of heads of a module of several roles, each of which has its queries, keys and values side by
            side.
        softcap: of scores; None: they are not capped.
        sinks: the parameter of the layer with a further logit of each head; None: there is none.
        keys_of: the layer whose keys and values it reads; None: its own.
        has_wide_norms: norms of queries and keys are over all heads; norms_rotated: they come after the rotation.
        norms_values: values are normed by heads, without weights.
        gates_heads: the attention gate is one number of each head.
        query_growth, query_period: queries are multiplied by 1 + growth * log(1 + position // period).
        out_scale: of what it adds.
    """

    ROLES: ClassVar[tuple[str, ...]] = ("query", "attention_gate", "key", "value", "out")
    NORMS: ClassVar[tuple[str, ...]] = ("query_norm", "key_norm")
    qkv_groups: int = 1
    softcap: float | None = None
    sinks: str | None = None
    keys_of: int | None = None
    has_wide_norms: bool = False
    norms_rotated: bool = False
    norms_values: bool = False
    gates_heads: bool = False
    query_growth: float = 0.0
    query_period: int = 1
    out_scale: float = 1.0

    def out_features(self, role: str) -> int:
        """Return the outputs of a linear layer (`Part.out_features`)."""
        if role == "out":
            return 0
        if role == "attention_gate":
            return self.num_heads * (1 if self.gates_heads else self.head_dim)
        return (self.num_heads if role == "query" else self.num_kv_heads) * self.head_dim

    def in_features(self, role: str) -> int:
        """Return the inputs of a linear layer (`Part.in_features`)."""
        return self.num_heads * self.head_dim if role == "out" else 0

    def norm_width(self, role: str) -> int:
        """Return the numbers that a norm is over (`Part.norm_width`)."""
        heads = self.num_heads if role == "query_norm" else self.num_kv_heads
        return self.head_dim * (heads if self.has_wide_norms else 1)

    def rows(self, role: str, *, in_pairs: bool) -> Tensor | None:
        """Return the rows of the module's weight that are a role's (`Part.rows`)."""
        sharing = self.sharing(role)
        order = self.head_order(in_pairs=in_pairs) if role in ("query", "key") else None
        if len(sharing) == 1 and order is None:
            return None
        groups = self.qkv_groups if len(sharing) > 1 else 1
        found = rows_among(sharing, role, {each: self.out_features(each) for each in sharing}, groups)
        return found if order is None else found.view(-1, self.head_dim)[:, order].reshape(-1)

    def norm_order(self, role: str, *, in_pairs: bool) -> Tensor | None:
        """Return the order of the weights of a norm of queries or keys (`Part.norm_order`)."""
        order = self.head_order(in_pairs=in_pairs)
        if order is None or not self.has_wide_norms:
            return order
        heads = torch.arange(self.norm_width(role) // self.head_dim)[:, None] * self.head_dim
        return (heads + order).reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention(AnyAttention):
    """Multi-head latent attention: of each position one latent, of which all heads make keys and values, and one
    rotated key, which they share.

    Its roles are "query", of the row, or of what "q_a_proj" gives behind "q_a_layernorm"; and "kv_a_proj", which gives
    the latent, behind "kv_a_layernorm", and the key. Each head of a query has first what is not rotated.

    Attributes:
        kv_lora_rank: numbers of the latent.
        v_head_dim: numbers of a head's value.
        q_lora_rank: numbers that queries are made of; 0: they are made of the row.
        kv_b_proj: the module of a layer that makes of a latent each head's key, but for what is rotated, and value. Its
            weight stays numbers: one part is multiplied from the other side, and its groups of inputs would be others.
        eps: of both norms.
    """

    ROLES: ClassVar[tuple[str, ...]] = ("query", "q_a_proj", "kv_a_proj", "out")
    NORMS: ClassVar[tuple[str, ...]] = ("q_a_layernorm", "kv_a_layernorm")
    num_kv_heads: int = 1
    kv_lora_rank: int
    v_head_dim: int
    q_lora_rank: int = 0
    kv_b_proj: str = "self_attn.kv_b_proj"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if min(self.kv_lora_rank, self.v_head_dim) < 1:
            raise ValueError(f"a latent of {self.kv_lora_rank} numbers, values of {self.v_head_dim}")

    @property
    def cached_widths(self) -> tuple[int, int]:
        """Return the numbers of a key and of a value as they are kept."""
        return self.rotated + self.kv_lora_rank, self.kv_lora_rank

    @property
    def kv_b_shape(self) -> tuple[int, int]:
        """Return the shape of the weight of `kv_b_proj`."""
        return self.num_heads * (self.head_dim - self.rotated + self.v_head_dim), self.kv_lora_rank

    def out_features(self, role: str) -> int:
        """Return the outputs of a linear layer (`Part.out_features`)."""
        widths = {"query": self.num_heads * self.head_dim, "q_a_proj": self.q_lora_rank}
        return widths.get(role, self.cached_widths[0] if role == "kv_a_proj" else 0)

    def in_features(self, role: str) -> int:
        """Return the inputs of a linear layer (`Part.in_features`)."""
        return {"query": self.q_lora_rank, "out": self.num_heads * self.v_head_dim}.get(role, 0)

    def norm_width(self, role: str) -> int:
        """Return the numbers that a norm is over (`Part.norm_width`)."""
        return self.q_lora_rank if role == "q_a_layernorm" else self.kv_lora_rank

    def rows(self, role: str, *, in_pairs: bool) -> Tensor | None:
        """Return the rows of the module's weight that are a role's, with what is rotated, the last numbers of a head in
        the files, first (`Part.rows`)."""
        if role not in ("query", "kv_a_proj"):
            return None
        width = self.head_dim if role == "query" else self.cached_widths[0]
        order = self.head_order(in_pairs=in_pairs)
        turned = torch.arange(self.rotated) if order is None else order[: self.rotated]
        head = torch.cat([width - self.rotated + turned, torch.arange(width - self.rotated)])
        return (torch.arange(0, self.out_features(role), width)[:, None] + head).reshape(-1)


def rows_among(sharing: list[str], role: str, sizes: Mapping[str, int], groups: int = 1) -> Tensor:
    """Return the rows of a role in a module that has those of several, int64.

    Args:
        sharing: the roles, in order. sizes: of each.
        groups: the module has a part of each role one after another, so many times.
    """
    size = sizes[role]
    start = sum(sizes[each] for each in sharing[: sharing.index(role)]) // groups
    stride = sum(sizes[each] for each in sharing) // groups
    return (torch.arange(groups)[:, None] * stride + torch.arange(start, start + size // groups)).reshape(-1)
