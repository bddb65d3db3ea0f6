"""The configuration of an EAGLE head (Li et al., 2401.15077; EAGLE-3: 2503.01840) and its tensors."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.drafters.models.heads.config import (
    DecoderHead,
    KeyShape,
    bias_shapes,
    layer_shapes,
    layers_spec,
    norms_of_each,
)
from forerun.errors import ConfigError
from forerun.models.spec.attention import LatentAttention
from forerun.models.spec.decoder import DecoderSpec

EAGLE_VERSIONS = (1, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(DecoderHead):
    """One decoder layer that reads a token's embedding beside the target's state of the position before.

    Row i holds token i + 1 and the target's state of token i; its logits are of token i + 2. Where no state of the
    target is there yet (below the first drafted token), the head's own output of row i - 1 stands in its place.

    Version 3: the states of `layers` are fused to g (`fc`), the layer's queries, keys and values read
    [input_layernorm(embedding); hidden_norm(g)], and g (normed with `norm_before_residual`) is its residual. The
    logits are lm_head(norm(output)), and the output goes to the next row, after `norm` with `norm_output`.
    Version 1: x = fc([embedding; state]) is the input and the residual of a layer without input_layernorm, there is no
    final norm, and the output layer is the target's.
    An MTP layer (DeepSeek-V3, 2412.19437) is a version 1 whose x = fc([enorm(embedding); hnorm(state)]) enters a whole
    decoder layer, and whose logits are those of norm(output).
    Published heads may have further layers, which are whole; biases; a scaled rotation; norms of queries and keys.

    Attributes (beside those of DecoderHead):
        version: 1 or 3.
        hidden_size: of the head's layer. Version 1: the target's.
        target_hidden_size: of the target's states and embeddings.
        layers: of the target, whose entering states are fused, rising; the number of the target's layers stands for
            the state after its final norm. Version 1: that alone.
        norm_before_fc: each of the states is RMS-normalised by itself, with weights, before they are fused (3.1).
        norm_all_before_fc: all of them together are ("input_norm").
        norm_before_residual: the residual is hidden_norm(g) in place of g.
        norm_output: what goes to the next row is the output after `norm` (3.1).
        embedding_residual: a linear map of the embedding is added to the residual. No public format can represent it.
        sliding_window: rows that a row attends to, itself included; None for all.
        is_mtp: it is an MTP layer.
        head_norms: queries and keys of each head are normalised.
    """

    version: int
    target_hidden_size: int
    norm_all_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    embedding_residual: bool = False
    rms_norm_eps: float = 1e-5
    is_mtp: bool = False
    head_norms: bool = False
    num_layers: int = 1

    def __post_init__(self) -> None:
        self.check_common(target_hidden_size=self.target_hidden_size)
        if self.version not in EAGLE_VERSIONS:
            raise ConfigError(f"version of the head is {self.version}, but must be 1 or 3.")
        if self.is_mtp and self.version != 1:
            raise ConfigError(f"an MTP layer is a head of version 1, not {self.version}.")
        if self.version == 1 and self.hidden_size != self.target_hidden_size:
            raise ConfigError(
                f"an EAGLE-1 head is as wide as its target, but has {self.hidden_size} for "
                f"{self.target_hidden_size}. Take version 3."
            )
        self.tensors()  # which compares biases with matrices

    @property
    def kind(self) -> str:
        """Return the kind of head with its version."""
        return "MTP" if self.is_mtp else f"EAGLE-{self.version}"

    @property
    def keys(self) -> KeyShape:
        """Return the shape of the keys of its layers."""
        return KeyShape(len(self.spec.layers), self.num_kv_heads, *self._cached_widths)

    @property
    def _cached_widths(self) -> tuple[int, int]:
        attention = self.spec.attention
        assert attention is not None
        return attention.cached_widths

    @property
    def spec(self) -> DecoderSpec:
        """Return its layers as those of a decoder. What the first reads, `entry_norms` have normed."""
        norm = "norm" if self.version == 3 or self.is_mtp else ""
        return layers_spec(self, head_norms=self.head_norms, norms_first=self.is_mtp, norm=norm)

    @property
    def state_norms(self) -> list[str]:
        """Return the names of the norms of the target's states, of each or of all together, as `DecoderHead` does."""
        return ["input_norm"] if self.norm_all_before_fc else norms_of_each(self)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return every trained tensor by name with its shape.

        The names are those that vLLM reads (EAGLE-3: `midlayer`), and for what it cannot read, names of the same style.
        `d2t`, which is not trained, is stored beside them where the draft vocabulary is smaller than the target's.
        """
        hidden = self.hidden_size
        target = self.target_hidden_size
        layer = self.layer_name
        states = 2 if self.version == 1 else len(self.layers)
        tensors: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, states * target),
            **layer_shapes(self.spec, layer, self.attention_input),
        }
        for index in range(1, self.num_layers):
            tensors |= layer_shapes(self.spec, f"layers.{index}", hidden)
            tensors[f"layers.{index}.input_layernorm.weight"] = (hidden,)
        for name, width in zip(self.entry_norms, (target, hidden), strict=False):
            tensors[f"{name}.weight"] = (width,)
        if self.is_mtp:
            tensors[f"{layer}.input_layernorm.weight"] = (hidden,)
        if self.spec.output.norm:
            tensors["norm.weight"] = (hidden,)
        if self.norm_before_fc:
            tensors |= {f"fc_norm.{i}.weight": (target,) for i in range(len(self.layers))}
        if self.norm_all_before_fc:
            tensors["input_norm.weight"] = (states * target,)
        if self.embedding_residual:
            tensors["embedding_residual.weight"] = (hidden, target)
        if self.own_output_rows:
            tensors["lm_head.weight"] = (self.draft_vocab_size, hidden)
        return tensors | bias_shapes(self, tensors)

    def extras(self) -> list[str]:
        """Return the features that not every EAGLE head has."""
        found = {
            "norms of states": self.norm_before_fc or self.norm_all_before_fc,
            "normed output": self.norm_output,
            "residual of the embedding": self.embedding_residual,
            "output rows of its own": self.own_output_rows,
            f"window of {self.sliding_window or 0:,}": self.sliding_window is not None,
            **self.further_parts,
        }
        return [name for name, holds in found.items() if holds]

    @property
    def further_parts(self) -> dict[str, bool]:
        """Return parts that a published head may have and none that forerun trains, and whether this one has them."""
        spec = self.spec
        first = spec.layers[0]
        rope = self.rope_scaling.get("rope_type")
        return {
            f"{len(spec.layers)} layers": len(spec.layers) > 1,
            "biases": bool(self.biases),
            "norms of queries and keys": "query_norm" in first.all_norms,
            "one norm of all states": self.norm_all_before_fc,
            f"rotation {rope}": rope is not None,
            "gated attention": "attention_gate" in first.roles,
            "latent attention": isinstance(first.attention, LatentAttention),
            "experts": first.experts is not None,
        }

    @property
    def layer_name(self) -> str:
        """Return how the names of the layer's tensors begin."""
        return "layers.0" if self.version == 1 else "midlayer"

    @property
    def entry_norms(self) -> tuple[str, ...]:
        """Return the names, without ".weight", of the norms of embedding and state; none of a version 1."""
        if self.version == 3:
            return f"{self.layer_name}.input_layernorm", f"{self.layer_name}.hidden_norm"
        return ("enorm", "hnorm") if self.is_mtp else ()

    @property
    def attention_input(self) -> int:
        """Return the width of what queries, keys and values are computed from."""
        return self.hidden_size if self.version == 1 else self.target_hidden_size + self.hidden_size
