"""The configuration of an EAGLE head (Li et al., 2401.15077; EAGLE-3: 2503.01840) and its tensors."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.drafters.heads.config import KeyShape, check_attention, check_layers, check_positive, check_vocabulary
from forerun.errors import ConfigError

EAGLE_VERSIONS = (1, 3)


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """One decoder layer that reads a token's embedding beside the target's state of the position before.

    Row i holds token i + 1 and the target's state of token i; its logits are of token i + 2. Where no state of the
    target is there yet (below the first drafted token), the head's own output of row i - 1 stands in its place.

    Version 3: the states of `layers` are fused to g (`fc`), the layer's queries, keys and values read
    [input_layernorm(embedding); hidden_norm(g)], and g (normed with `norm_before_residual`) is its residual. The
    logits are lm_head(norm(output)), and the output goes to the next row, after `norm` with `norm_output`.
    Version 1: x = fc([embedding; state]) is the input and the residual of a layer without input_layernorm, there is no
    final norm, and the output layer is the target's.
    An MTP layer (DeepSeek-V3, 2412.19437) is a version 1 whose x = fc([enorm(embedding); hnorm(state)]) enters a whole
    decoder layer, and whose logits are those of norm(output). Its attention may be that of Qwen3-Next: gated, and with
    norms of queries and keys before a part of each head is rotated.

    Attributes:
        version: 1 or 3.
        vocab_size: of the target.
        draft_vocab_size: tokens that the head can propose; vocab_size for all of them.
        hidden_size: of the head's layer. Version 1: the target's.
        target_hidden_size: of the target's states and embeddings.
        num_heads, num_kv_heads, head_dim: of the attention.
        intermediate_size: of the feed-forward part.
        layers: of the target, whose entering states are fused, rising; the number of the target's layers stands for
            the state after its final norm. Version 1: that alone.
        norm_before_fc: each of the states is RMS-normalised by itself, with weights, before they are fused (3.1).
        norm_before_residual: the residual is hidden_norm(g) in place of g.
        norm_output: what goes to the next row is the output after `norm` (3.1).
        embedding_residual: a linear map of the embedding is added to the residual. No public format can represent it.
        own_output_rows: lm_head is the head's own; otherwise the target's rows of the draft vocabulary are used.
        sliding_window: rows that a row attends to, itself included; None for all.
        rope_theta: of the rotation of queries and keys.
        rms_norm_eps: of all norms.
        max_positions: rows that it was made for.
        is_mtp: it is an MTP layer.
        attention_gate: what attention gives is multiplied by a sigmoid; q_proj has the query and the gate of each head
            side by side.
        head_norms: queries and keys of each head are normalised.
        rotated: numbers of each head that are rotated; None for all.
    """

    version: int
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    layers: tuple[int, ...]
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    embedding_residual: bool = False
    own_output_rows: bool = False
    sliding_window: int | None = None
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    max_positions: int = 2048
    is_mtp: bool = False
    attention_gate: bool = False
    head_norms: bool = False
    rotated: int | None = None

    def __post_init__(self) -> None:
        check_positive(
            "the head",
            vocab_size=self.vocab_size,
            draft_vocab_size=self.draft_vocab_size,
            hidden_size=self.hidden_size,
            target_hidden_size=self.target_hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            max_positions=self.max_positions,
        )
        if self.version not in EAGLE_VERSIONS:
            raise ConfigError(f"version of the head is {self.version}, but must be 1 or 3.")
        if self.is_mtp and self.version != 1:
            raise ConfigError(f"an MTP layer is a head of version 1, not {self.version}.")
        if not self.is_mtp and (self.attention_gate or self.head_norms or self.rotated is not None):
            raise ConfigError(
                "attention_gate, head_norms and rotated are those of an MTP layer, which this head is not."
            )
        if not 2 <= self.num_rotated <= self.head_dim or self.num_rotated % 2:
            raise ConfigError(f"rotated is {self.rotated}, but must be even, and from 2 to head_dim, {self.head_dim}.")
        check_vocabulary(self.draft_vocab_size, self.vocab_size)
        check_attention(self.num_heads, self.num_kv_heads, self.head_dim)
        check_layers(self.layers)
        if self.version == 1 and self.hidden_size != self.target_hidden_size:
            raise ConfigError(
                f"an EAGLE-1 head is as wide as its target, but has {self.hidden_size} for "
                f"{self.target_hidden_size}. Take version 3."
            )

    @property
    def kind(self) -> str:
        """Return the kind of head with its version."""
        return "MTP" if self.is_mtp else f"EAGLE-{self.version}"

    @property
    def keys(self) -> KeyShape:
        """Return the shape of the keys of its layer."""
        return KeyShape(1, self.num_kv_heads, self.head_dim)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return every trained tensor by name with its shape; linear layers have no biases.

        The names are those that vLLM reads (EAGLE-3: `midlayer`), and for what it cannot read, names of the same style.
        `d2t`, which is not trained, is stored beside them where the draft vocabulary is smaller than the target's.
        """
        hidden, target = self.hidden_size, self.target_hidden_size
        layer = self.layer_name
        wide, narrow = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        states = 2 if self.version == 1 else len(self.layers)
        tensors: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, states * target),
            f"{layer}.self_attn.q_proj.weight": (wide * (2 if self.attention_gate else 1), self.attention_input),
            f"{layer}.self_attn.k_proj.weight": (narrow, self.attention_input),
            f"{layer}.self_attn.v_proj.weight": (narrow, self.attention_input),
            f"{layer}.self_attn.o_proj.weight": (hidden, wide),
            f"{layer}.mlp.gate_proj.weight": (self.intermediate_size, hidden),
            f"{layer}.mlp.up_proj.weight": (self.intermediate_size, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, self.intermediate_size),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
        }
        if self.version == 3:
            tensors |= {
                f"{layer}.input_layernorm.weight": (target,),
                f"{layer}.hidden_norm.weight": (hidden,),
                "norm.weight": (hidden,),
            }
        if self.is_mtp:
            tensors |= {
                "enorm.weight": (target,),
                "hnorm.weight": (target,),
                f"{layer}.input_layernorm.weight": (hidden,),
                "norm.weight": (hidden,),
            }
        if self.head_norms:
            tensors |= {f"{layer}.self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        if self.norm_before_fc:
            tensors |= {f"fc_norm.{i}.weight": (target,) for i in range(len(self.layers))}
        if self.embedding_residual:
            tensors["embedding_residual.weight"] = (hidden, target)
        if self.own_output_rows:
            tensors["lm_head.weight"] = (self.draft_vocab_size, hidden)
        return tensors

    def extras(self) -> list[str]:
        """Return the features that not every EAGLE head has."""
        found = {
            "norms of states": self.norm_before_fc,
            "normed output": self.norm_output,
            "residual of the embedding": self.embedding_residual,
            "output rows of its own": self.own_output_rows,
            f"window of {self.sliding_window or 0:,}": self.sliding_window is not None,
            "gated attention": self.attention_gate,
            "norms of queries and keys": self.head_norms,
            f"rotation of {self.num_rotated} of {self.head_dim} numbers": self.num_rotated < self.head_dim,
        }
        return [name for name, holds in found.items() if holds]

    @property
    def num_rotated(self) -> int:
        """Return the numbers of each head that are rotated."""
        return self.head_dim if self.rotated is None else self.rotated

    @property
    def layer_name(self) -> str:
        """Return how the names of the layer's tensors begin."""
        return "layers.0" if self.version == 1 else "midlayer"

    @property
    def entry_norms(self) -> tuple[str, ...]:
        """Return the names of the norms of embedding and state, without ".weight", that an MTP layer begins with."""
        return ("enorm", "hnorm") if self.is_mtp else ()

    @property
    def attention_input(self) -> int:
        """Return the width of what queries, keys and values are computed from."""
        return self.hidden_size if self.version == 1 else self.target_hidden_size + self.hidden_size
