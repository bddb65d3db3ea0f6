"""What a decoder is made of, as data, read by the decoders of this folder; `families.py` says it of each family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from forerun.models.fused.parts import EXPERT, EXPERT_NORMS, RECURRENT_ROLES, Experts, Latent, Recurrence, TokenInputs

TOKEN_ROLES = ("token_gate", "token_out")
"""Linear layers of a layer that its token gives something (`TokenInputs`)."""
ROLES = ("query", "entry", "latent", "attention_gate", "key", "value", "out", "gate", "up", "down", *TOKEN_ROLES)
"""Linear layers of a decoder's layer that attends."""
NORMS: tuple[str, ...] = ("input_norm", "query_norm", "key_norm", "attention_norm", "mlp_norm", "feed_norm")
NORMS += ("entry_norm", "latent_norm", *EXPERT_NORMS, "token_norm")
"""Its norms: before attention, of queries and keys, of what attention adds, and the same of the feed-forward layer; of
what queries are made of, and of a latent; those of `Experts`; and of what "token_out" gives."""
NORM_OWNERS = {"mlp_norm": "feeds", "feed_norm": "feeds", **dict.fromkeys(EXPERT_NORMS, "has_experts")}
NORM_OWNERS |= dict.fromkeys(("query_norm", "key_norm", "entry_norm", "latent_norm"), "attends")
"""Norm -> the field of `LayerSpec` that is true of layers with this norm. Others are of all that attend or recur."""
LLAMA_MODULES = {
    "input_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
HEAD_NORMS = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
QKV = frozenset({"query", "key", "value", "attention_gate"})
ATTENTION = QKV | {"out"}
FEED = frozenset({"gate", "up", "down"})
"""The linear layers by place."""
SHARED = ("shared_gate", "shared_up", "shared_down")
"""Of an expert that every row is given to; in the native kernels, the layer's own."""
_KINDS = "weight", "bias"
GATED_QUERY = {"attention_gate": "self_attn.q_proj"}
"""Of attention whose result is multiplied by a sigmoid: each head has its query and the gate side by side."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What differs from layer to layer.

    Attributes:
        window: positions that a row sees; None: all. rotation: which of the decoder's rotations there is; None: none.
        attends, is_recurrent, feeds: whether it has attention, a recurrence, a feed-forward layer.
        has_experts: of the feed-forward layer. feed_scale: a factor of what it adds. norms_input: there is an
            "input_norm", where `DecoderSpec.norm_owners` leaves that open.
        keys_of: the layer whose keys and values it reads; None: its own.
        differing: fields of `DecoderSpec` that are otherwise in it, and what they are (`DecoderSpec.within`).
    """

    window: int | None = None
    rotation: int | None = 0
    attends: bool = True
    is_recurrent: bool = False
    feeds: bool = True
    has_experts: bool = False
    norms_input: bool = True
    feed_scale: float = 1.0
    keys_of: int | None = None
    differing: tuple[tuple[str, Any], ...] = ()

    @property
    def mixes(self) -> bool:
        """Return whether it has attention or a recurrence."""
        return self.attends or self.is_recurrent


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder.

    Attributes:
        num_heads, num_kv_heads, head_dim, hidden, intermediate: sizes.
        layers: what differs from layer to layer.
        rotations: the kind of layers that each rotation is for, None for all, and its parameters, as a configuration's
            `rope_parameters` has them.
        rotated: numbers of each head that are rotated.
        turns_back: angles are negative.
        is_interleaved: numbers 2i and 2i + 1 are rotated together, not i and i + rotated / 2.
        modules: role -> the module of a layer, for each of ROLES and NORMS that there is. Several of query, key and
            value, or gate and up, may name one module, which has their outputs one after another.
        qkv_groups: groups of heads of such a module, each of which has its queries, keys and values side by side.
        is_transposed: the linear layers of the layers have weights [in, out].
        biases: roles, "norms" and "head", that have a bias.
        base, embedding, norm, head, layer_list: paths in the model; all but `base` and `head` are below `base`.
        positions, first_position: of a table of what is added to the embeddings, below `base`, and its row for the
            first position; None: nothing is.
        renamed: parts of the names of parameters that files have, and what they are in Transformers.
        norms_embeddings: the final norm is applied to embeddings too.
        eps: of all norms.
        norm_kind: "rms" or "layer"; norm_offset: what is added to their weights; has_norm_weights: else these are 1.
        norm_owners: which layers have a norm, as NORM_OWNERS.
        has_wide_norms: norms of queries and keys are over all heads; norms_rotated: they come after the rotation.
        norms_values: values are normed by heads, without weights. Without the role "value" they are what the role "key"
            gives, before its norm.
        activation: "silu", "gelu", "gelu_tanh", "relu2", "relu" or "xielu".
        curve: the module of a layer with the numbers of "xielu".
        is_parallel: attention and feed-forward layer read, and add to, the same residual.
        scale, softcap: of attention's scores; None: not capped.
        gates_heads: the attention gate is one number of each head.
        query_growth, query_period: queries are multiplied by 1 + growth * log(1 + position // period).
        embedding_scale, residual_scale, logit_scale: factors. attention_scale: of what attention adds,
            besides residual_scale. activation_scale: of what the activation reads. logit_softcap: None: not capped.
        recurrence: of the layers that are recurrent.
        experts: of the layers that have any.
        token_inputs: what tokens give layers besides embeddings.
        layer_scale: the parameter of a layer, [1], that what comes out of it is multiplied by.
        sinks: the parameter of a layer with a further logit of each head's attention.
        latent: of which keys and values are made. `head_dim` is that of queries then, whose last numbers are rotated.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    layers: tuple[LayerSpec, ...]
    rotations: tuple[tuple[str | None, Mapping[str, Any]], ...]
    rotated: int
    scale: float
    eps: float
    turns_back: bool = False
    is_interleaved: bool = False
    modules: Mapping[str, str] = field(default_factory=lambda: LLAMA_MODULES)
    qkv_groups: int = 1
    is_transposed: bool = False
    biases: frozenset[str] = frozenset()
    base: str = "model"
    embedding: str = "embed_tokens"
    layer_list: str = "layers"
    norm: str = "norm"  # empty: there is none
    head: str = "lm_head"
    positions: str | None = None
    first_position: int = 0
    renamed: Mapping[str, str] = field(default_factory=dict)
    norms_embeddings: bool = False
    norm_kind: str = "rms"
    norm_offset: float = 0.0
    has_norm_weights: bool = True
    norm_owners: Mapping[str, str] = field(default_factory=lambda: NORM_OWNERS)
    has_wide_norms: bool = False
    norms_rotated: bool = False
    norms_values: bool = False
    activation: str = "silu"
    curve: str | None = None
    is_parallel: bool = False
    gates_heads: bool = False
    softcap: float | None = None
    query_growth: float = 0.0
    query_period: int = 1
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float = 1.0
    activation_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    recurrence: Recurrence | None = None
    experts: Experts | None = None
    token_inputs: TokenInputs | None = None
    layer_scale: str | None = None
    sinks: str | None = None
    latent: Latent | None = None

    def within(self, layer: LayerSpec) -> DecoderSpec:
        """Return the same as it is in a layer, of which its roles, rows and widths are."""
        return replace(self, **dict(layer.differing)) if layer.differing else self

    @property
    def cached_widths(self) -> tuple[int, int]:
        """Return the numbers of a key and of a value as they are kept."""
        if self.latent is None:
            return self.head_dim, self.head_dim
        return self.rotated + self.latent.rank, self.latent.rank

    @property
    def is_llama(self) -> bool:
        """Return whether it is a decoder of the Llama family, to which nothing is added."""
        plain = DecoderSpec(
            *(self.num_heads, self.num_kv_heads, self.head_dim, self.hidden, self.intermediate),
            *(self.layers, self.rotations, self.head_dim, self.head_dim**-0.5, self.eps),
            modules=LLAMA_MODULES | {role: name for role, name in self.modules.items() if role in HEAD_NORMS},
            biases=self.biases & ATTENTION,
        )
        own = {(layer.rotation, layer.feed_scale, layer.keys_of) for layer in self.layers}
        return self == plain and own == {(0, 1.0, None)}

    @property
    def embedding_weight(self) -> str:
        """Return the name of the embedding's parameter."""
        return f"{self.base}.{self.embedding}.weight"

    @property
    def head_weight(self) -> str:
        """Return the name of the output layer's parameter."""
        return f"{self.head}.weight"

    @property
    def token_table(self) -> str:
        """Return the name of the parameter of the table of `token_inputs`; an empty one if there is none."""
        return "" if self.token_inputs is None else f"{self.base}.{self.token_inputs.table}.weight"

    @property
    def unread(self) -> frozenset[str]:
        """Return the names of parameters that files may have, of layers that read the keys of others."""
        base = f"{self.base}.{self.layer_list}"
        shared = [index for index, layer in enumerate(self.layers) if layer.keys_of is not None]
        names = [self.modules[role] for role in ("key", "value", "key_norm") if role in self.modules]
        return frozenset(f"{base}.{index}.{name}.{kind}" for index in shared for name in names for kind in _KINDS)

    def matrices(self) -> frozenset[str]:
        """Return the names of the weights that can be quantized."""
        base = f"{self.base}.{self.layer_list}"
        layers = {
            f"{base}.{index}.{path}.weight"
            for index, layer in enumerate(self.layers)
            for path in (*map(self.within(layer).module, self.roles(layer)), *self.expert_paths(layer))
        }
        outer = {self.embedding_weight, self.head_weight}
        if self.token_inputs is not None:
            outer |= {self.token_table, f"{self.base}.{self.token_inputs.product}.weight"}
        return frozenset(layers | outer)

    def roles(self, layer: LayerSpec) -> list[str]:
        """Return the linear layers of a layer."""
        found = [*(RECURRENT_ROLES if layer.is_recurrent else ())]
        is_dense = layer.feeds and not layer.has_experts
        found += [role for role in ROLES if (is_dense if role in FEED else layer.attends)]
        found += SHARED if layer.has_experts else ()
        modules = self.within(layer).modules
        return [role for role in found if role in modules]

    def expert_paths(self, layer: LayerSpec) -> list[str]:
        """Return the modules of a layer's experts, those of one after those of another."""
        if self.experts is None or not layer.has_experts:
            return []
        paths = dict.fromkeys(self.experts.modules.values())
        return [path.format(index) for index in range(self.experts.count) for path in paths]

    def norms(self, layer: LayerSpec) -> list[str]:
        """Return the norms of a layer, but for that of a recurrence."""
        owners, modules = self.norm_owners, self.within(layer).modules
        return [role for role in NORMS if role in modules and getattr(layer, owners.get(role, "mixes"))]

    def cached(self, index: int) -> int:
        """Return the place of the keys and values that a layer reads, among those that are kept."""
        of = index if self.layers[index].keys_of is None else self.layers[index].keys_of
        return sum(layer.attends and layer.keys_of is None for layer in self.layers[:of])

    def parameter(self, stored: str) -> str:
        """Return the name of the parameter that files have under this name: some leave `base` out."""
        if stored == "embed_out.weight":  # as Transformers' GPT-NeoX was formerly
            return self.head_weight
        for part, ours in self.renamed.items():
            stored = stored.replace(part, ours)
        return stored if stored.startswith((f"{self.base}.", f"{self.head}.")) else f"{self.base}.{stored}"

    def dtype_in(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the type of a parameter in a model of this type."""
        shape, experts = self.recurrence, self.experts
        ends = () if shape is None else tuple(f".{shape.numbers[each]}" for each in shape.unrounded)
        if experts is not None:
            ends += (f".{experts.router}.weight",) if experts.unrounded else ()
            ends += () if experts.bias is None else (f".{experts.bias}",)
        return torch.promote_types(dtype, torch.float32) if name.endswith(ends) else dtype

    def embedding_scale_in(self, dtype: torch.dtype) -> float:
        """Return the factor of embeddings as a model of this type has it."""
        return float(torch.tensor(self.embedding_scale, dtype=torch.float64).to(dtype))

    def module(self, role: str, expert: int = 0) -> str:
        """Return the module of a layer with a role. expert: whose, of EXPERT."""
        if role in EXPERT and self.experts is not None:
            return self.experts.modules[role].format(expert)
        return self.modules[role]

    def out_features(self, role: str) -> int:
        """Return the outputs of a linear layer."""
        if self.recurrence is not None and role in RECURRENT_ROLES[:-1]:
            return self.recurrence.out_features(role, are_apart="mixed_key" in self.modules)
        widths = {"query": self.num_heads, "key": self.num_kv_heads, "value": self.num_kv_heads}
        if role == "attention_gate":
            return self.num_heads * (1 if self.gates_heads else self.head_dim)
        if role in widths:
            return widths[role] * self.head_dim
        if role == "token_gate" and self.token_inputs is not None:
            return self.token_inputs.width
        if self.latent is not None and role in ("entry", "latent"):
            return self.latent.entry_width if role == "entry" else self.cached_widths[0]
        return self._fed(role) if role.endswith(("gate", "up")) else self.hidden

    def in_features(self, role: str) -> int:
        """Return the inputs of a linear layer."""
        if role == "mixed_out" and self.recurrence is not None:
            return self.recurrence.wide
        if role == "token_out" and self.token_inputs is not None:
            return self.token_inputs.width
        if role == "out":
            return self.num_heads * (self.head_dim if self.latent is None else self.latent.value_width)
        if role == "query" and self.latent is not None and self.latent.entry_width:
            return self.latent.entry_width
        return self._fed(role) if role.endswith("down") else self.hidden

    def _fed(self, role: str) -> int:
        """Return the intermediate numbers of a feed-forward layer with this role."""
        if self.experts is None or role in FEED:
            return self.intermediate
        return self.experts.width if role in EXPERT else self.experts.shared_width

    def norm_width(self, role: str) -> int:
        """Return the numbers that a norm is over."""
        if self.latent is not None and role in ("entry_norm", "latent_norm"):
            return self.latent.entry_width if role == "entry_norm" else self.latent.rank
        if role not in ("query_norm", "key_norm"):
            return self.hidden
        heads = self.num_heads if role == "query_norm" else self.num_kv_heads
        return self.head_dim * (heads if self.has_wide_norms else 1)

    def sharing(self, role: str) -> list[str]:
        """Return the roles whose outputs this role's module has, in order."""
        names = self.modules if self.experts is None else {**self.modules, **self.experts.modules}
        return [each for each in (*ROLES, *RECURRENT_ROLES, *SHARED, *EXPERT) if names.get(each, "") == names[role]]

    def weight(self, module: Any) -> Tensor:
        """Return the weight of a layer's linear module, [out, in]."""
        found: Tensor = module.weight
        return found.T if self.is_transposed else found

    def rows(self, role: str, *, in_pairs: bool) -> Tensor | None:
        """Return the rows of the module's weight that are a role's, int64; None for all in order.

        in_pairs: numbers of queries and keys that are rotated together are to be side by side; else half of what is
            rotated apart. What is rotated comes first.
        """
        if self.recurrence is not None and role in RECURRENT_ROLES:
            return self.recurrence.rows(role)
        size, sharing = self.out_features(role), self.sharing(role)
        order = self.head_order(in_pairs=in_pairs) if role in ("query", "key") else None
        if self.latent is not None and role in ("query", "latent"):
            width = self.head_dim if role == "query" else self.cached_widths[0]
            return self.latent.rows(size // width, width, self.rotated, self.head_order(in_pairs=in_pairs))
        if len(sharing) == 1 and order is None:
            return None
        groups = self.qkv_groups if role in QKV and len(sharing) > 1 else 1
        start = sum(self.out_features(each) for each in sharing[: sharing.index(role)]) // groups
        stride = sum(map(self.out_features, sharing)) // groups
        found = (torch.arange(groups)[:, None] * stride + torch.arange(start, start + size // groups)).reshape(-1)
        return found if order is None else found.view(-1, self.head_dim)[:, order].reshape(-1)

    def head_order(self, *, in_pairs: bool) -> Tensor | None:
        """Return the order of a head's numbers, int64 [head_dim], as `rows`; None for that of the files."""
        if in_pairs == self.is_interleaved:
            return None
        half, places = self.rotated // 2, torch.arange(self.head_dim)
        turned = places[: self.rotated].view(2, half).T if in_pairs else places[: self.rotated].view(half, 2).T
        return torch.cat([turned.reshape(-1), places[self.rotated :]])

    def norm_order(self, role: str, *, in_pairs: bool) -> Tensor | None:
        """Return the order of the weights of a norm of queries or keys, as `rows`."""
        order = self.head_order(in_pairs=in_pairs) if role in ("query_norm", "key_norm") else None
        if order is None or not self.has_wide_norms:
            return order
        heads = torch.arange(self.norm_width(role) // self.head_dim)[:, None] * self.head_dim
        return (heads + order).reshape(-1)
