"""A decoder: its layers, its embeddings, and its output layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from forerun.models.spec.attention import ATTENTION, HEAD_NORMS, LLAMA_ATTENTION, AnyAttention, Attention, Rope
from forerun.models.spec.feed_forward import LLAMA_FEED, Experts, FeedForward
from forerun.models.spec.layer import LayerSpec
from forerun.models.spec.recurrence import Recurrence


@dataclass(frozen=True, slots=True)
class Norms:
    """What all norms of a decoder have in common.

    Attributes:
        eps: of all. kind: "rms" or "layer".
        offset: what is added to their weights; has_weights: else these are 1.
        has_biases: "input_norm", "mlp_norm" and the final one have a bias.
    """

    eps: float
    kind: str = "rms"
    offset: float = 0.0
    has_weights: bool = True
    has_biases: bool = False


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """What a token gives each layer besides its embedding (`PerLayerInput`): numbers of a table, and a product of the
    embedding behind a norm.

    Attributes:
        width: numbers for a layer. vocab_size: tokens of the table.
        table, product, norm: modules below `DecoderSpec.base`. The first two have the numbers for all layers.
    """

    width: int
    vocab_size: int
    table: str
    product: str
    norm: str


@dataclass(frozen=True, slots=True)
class Embeddings:
    """What enters the first layer.

    Attributes:
        module: below `DecoderSpec.base`. scale: of its rows. is_normed: the final norm is applied to them.
        positions, first_position: the module of a table of what is added to them, and its row for the first position;
            None: nothing is.
        per_layer: what tokens give layers besides.
    """

    module: str = "embed_tokens"
    scale: float = 1.0
    is_normed: bool = False
    positions: str | None = None
    first_position: int = 0
    per_layer: PerLayerInputs | None = None

    def scale_in(self, dtype: torch.dtype) -> float:
        """Return the factor as a model of this type has it."""
        return float(torch.tensor(self.scale, dtype=torch.float64).to(dtype))


@dataclass(frozen=True, slots=True)
class Output:
    """What makes logits of what comes out of the last layer.

    Attributes:
        norm: the final one, below `DecoderSpec.base`; empty: there is none.
        module: the output layer. has_bias: it has one.
        scale: of logits. softcap: of them; None: they are not capped.
    """

    norm: str = "norm"
    module: str = "lm_head"
    has_bias: bool = False
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder.

    Attributes:
        hidden: numbers of the residual.
        layers: in order. layer_list: the module that has them, below `base`.
        ropes: the rotations of its layers, one at least.
        norms: what all have in common. embeddings, output: around the layers.
        residual_scale: of all that is added to the residual.
        base: the module that has all but the output layer.
        renamed: parts of the names of parameters that files have, and what they are in Transformers.
    """

    hidden: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[Rope, ...]
    norms: Norms
    embeddings: Embeddings = Embeddings()
    output: Output = Output()
    residual_scale: float = 1.0
    base: str = "model"
    layer_list: str = "layers"
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def attention(self) -> AnyAttention | None:
        """Return the attention of the first layer that has any."""
        return next((layer.attention for layer in self.layers if layer.attention is not None), None)

    @property
    def experts(self) -> Experts | None:
        """Return the mixture of experts of the first layer that has any: those of others are the same."""
        return next((layer.experts for layer in self.layers if layer.experts is not None), None)

    @property
    def recurrence(self) -> Recurrence | None:
        """Return the recurrence of the first layer that has any: those of others are the same."""
        return next((layer.recurrence for layer in self.layers if layer.recurrence is not None), None)

    @property
    def is_llama(self) -> bool:
        """Return whether it is a decoder of the Llama family, to which nothing is added."""
        plain = DecoderSpec(
            hidden=self.hidden,
            layers=tuple(map(_as_llama, self.layers)),
            ropes=self.ropes,
            norms=Norms(self.norms.eps),
        )
        return self == plain

    def layer_path(self, index: int) -> str:
        """Return the path of a layer in the model."""
        return f"{self.base}.{self.layer_list}.{index}"

    @property
    def embedding_weight(self) -> str:
        """Return the name of the embedding's parameter."""
        return f"{self.base}.{self.embeddings.module}.weight"

    @property
    def head_weight(self) -> str:
        """Return the name of the output layer's parameter."""
        return f"{self.output.module}.weight"

    @property
    def per_layer_table(self) -> str:
        """Return the name of the parameter of the table of `PerLayerInputs`; an empty one if there is none."""
        inputs = self.embeddings.per_layer
        return "" if inputs is None else f"{self.base}.{inputs.table}.weight"

    @property
    def unread(self) -> frozenset[str]:
        """Return the names of parameters that files may have, of layers that read the keys of others."""
        attentions = [layer.attention for layer in self.layers]
        named = [each.modules for each in attentions if each is not None]
        modules = {each[role] for each in named for role in ("key", "value", "key_norm") if role in each}
        return frozenset(
            f"{self.layer_path(index)}.{name}.{kind}"
            for index, each in enumerate(attentions)
            if isinstance(each, Attention) and each.keys_of is not None
            for name in modules
            for kind in ("weight", "bias")
        )

    def matrices(self) -> frozenset[str]:
        """Return the names of the weights that can be quantized."""
        found = {self.embedding_weight, self.head_weight}
        if (inputs := self.embeddings.per_layer) is not None:
            found |= {self.per_layer_table, f"{self.base}.{inputs.product}.weight"}
        for index, layer in enumerate(self.layers):
            found |= {f"{self.layer_path(index)}.{module}.weight" for module in layer.matrices()}
        return frozenset(found)

    def cached(self, index: int) -> int:
        """Return the place of the keys and values that a layer reads, among those that are kept."""
        own = self.layers[index].attention
        of = own.keys_of if isinstance(own, Attention) and own.keys_of is not None else index
        return sum(keeps_keys(layer) for layer in self.layers[:of])

    def parameter(self, stored: str) -> str:
        """Return the name of the parameter that files have under this name: some leave `base` out."""
        if stored == "embed_out.weight":  # as Transformers' GPT-NeoX was formerly
            return self.head_weight
        for part, ours in self.renamed.items():
            stored = stored.replace(part, ours)
        return stored if stored.startswith((f"{self.base}.", f"{self.output.module}.")) else f"{self.base}.{stored}"

    def dtype_in(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the type of a parameter in a model of this type."""
        shape = self.recurrence
        experts = self.experts
        ends = () if shape is None else tuple(f".{shape.parameters[each]}" for each in shape.unrounded)
        if experts is not None:
            bias = experts.e_score_correction_bias
            ends += (f".{experts.router}.weight",) if experts.unrounded else ()
            ends += () if bias is None else (f".{bias}",)
        return torch.promote_types(dtype, torch.float32) if name.endswith(ends) else dtype


def keeps_keys(layer: LayerSpec) -> bool:
    """Return whether a layer has attention with keys and values of its own."""
    return layer.attention is not None and getattr(layer.attention, "keys_of", None) is None


def _as_llama(layer: LayerSpec) -> LayerSpec:
    """Return a layer of the Llama family of the same sizes, with norms of queries and keys where this one has them."""
    own = layer.attention
    feed = layer.feed_forward
    attention = feed_forward = None
    if own is not None:
        attention = Attention(
            num_heads=own.num_heads,
            num_kv_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            scale=own.head_dim**-0.5,
            rotated=own.head_dim,
            window=own.window,
            modules=LLAMA_ATTENTION | {role: name for role, name in own.modules.items() if role in HEAD_NORMS},
            biases=own.biases & ATTENTION,
        )
    if isinstance(feed, FeedForward):
        feed_forward = FeedForward(intermediate_size=feed.intermediate_size, modules=LLAMA_FEED)
    return LayerSpec(hidden=layer.hidden, attention=attention, feed_forward=feed_forward)
