"""The configuration of a block head (DFlash: 2602.06036; DSpark: 2607.05147), and the tensors that it consists of."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.config import MAX_BLOCK_SIZE
from forerun.drafters.models.eagle.config import EagleConfig
from forerun.drafters.models.heads.config import (
    DecoderHead,
    KeyShape,
    bias_shapes,
    layer_shapes,
    layers_spec,
)
from forerun.errors import ConfigError
from forerun.models.spec.decoder import DecoderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig(DecoderHead):
    """A few decoder layers that draft all tokens of a block in one pass.

    Context row i is C_i = hidden_norm(fc(the target's states of token i)). In every layer its key and value are
    projected from C_i alone: nothing of it depends on other rows. A block has slots 0, 1, ...: slot 0 holds the
    embedding of the last committed token, at position n - 1, every other the mask's. Queries are of the slots; they
    attend to the context rows of positions below n - 1 and to all slots of the block. Layers are Llama's, queries and
    keys RMS-normalised head by head before they are rotated. Slot k predicts token n - 1 + k, or, with
    `sample_from_anchor`, n + k: its logits are lm_head(norm(output)), plus W2 W1[the token before] with a Markov bias.

    With `context_tokens` the head is one layer of an EAGLE-3 head (`layer_of_pairs`), that drafts in parallel. Context
    row i is that head's: it reads the embedding of token i + 1 beside F_i = fc(the target's states of token i), and so
    knows which token followed. Slot k (0, 1, ...) reads what context row n - 2 reads, with vectors of its own added:
    the embedding of the last committed token + slot_embeddings[k], and F_(n-2) + slot_states[k]. It predicts token
    n + k. There are no masks, and queries and keys have no norms. No public format can represent it.

    Attributes (beside those of DecoderHead):
        hidden_size: of the head, its target's states and embeddings.
        layers: of the target, whose entering states are fused, rising; the number of the target's layers stands for
            the state after its final norm.
        block_size: tokens that one pass drafts.
        sample_from_anchor: slot 0 predicts too, so that a block has as many slots as tokens; otherwise one more.
        mask_token_id: whose embedding stands for the mask; None: a vector that was learnt.
        markov_rank: of the bias by the token before; 0 for none.
        markov_shared: its W1 and W2 are the target's embeddings and the output rows, each times a trained matrix:
            W2 W1[t] = lm_head(w2 w1 embedding(t)). No public format can represent it.
        confidence: there is an estimate of the probability that a token is accepted.
        confidence_with_markov: it reads W1[the token before] beside the slot's output.
        context_tokens: rows read the embedding of the token that follows beside the states.
        norm_before_fc: each of the states is RMS-normalised by itself, with weights, before they are fused. No public
            format can represent it.
        sliding_window: positions that the slots of a block attend to, up to its last slot; None for all. No public
            format can represent it.
    """

    block_size: int
    sample_from_anchor: bool = False
    mask_token_id: int | None = None
    markov_rank: int = 0
    markov_shared: bool = False
    confidence: bool = False
    confidence_with_markov: bool = True
    context_tokens: bool = False

    def __post_init__(self) -> None:
        self.check_common(block_size=self.block_size)
        if self.block_size > MAX_BLOCK_SIZE:
            raise ConfigError(f"block_size of the head is {self.block_size}, but must be at most {MAX_BLOCK_SIZE}.")
        if self.markov_rank < 0:
            raise ConfigError(f"markov_rank of the head is {self.markov_rank}, but must be 0 or more.")
        if self.markov_shared and not self.markov_rank:
            raise ConfigError("markov_shared is set, but markov_rank of the head is 0: there is no bias to share.")
        if self.sliding_window is not None and self.sliding_window <= self.num_slots:
            raise ConfigError(
                f"sliding_window of the head is {self.sliding_window}, but must be above {self.num_slots}, its slots."
            )
        if self.context_tokens:
            self._check_pairs()
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                f"mask_token_id of the head is {self.mask_token_id}, and its target has {self.vocab_size:,} tokens."
            )
        self.tensors()  # which compares biases with matrices

    def _check_pairs(self) -> None:
        """Raise ConfigError for settings that a head with `context_tokens` cannot have."""
        found = {
            f"{self.num_layers} layers, of which only the first could read tokens": self.num_layers > 1,
            "a slot for the last token, whose context row reads it": self.sample_from_anchor,
            "a token for the mask, which it does not have": self.mask_token_id is not None,
        }
        for what, is_there in found.items():
            if is_there:
                raise ConfigError(f"a block head with context_tokens has one layer and no masks, but this has {what}.")

    @property
    def layer_of_pairs(self) -> EagleConfig:
        """Return the EAGLE-3 layer of a head with `context_tokens`."""
        return EagleConfig(
            version=3,
            vocab_size=self.vocab_size,
            draft_vocab_size=self.draft_vocab_size,
            hidden_size=self.hidden_size,
            target_hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            layers=self.layers,
            norm_before_fc=self.norm_before_fc,
            norm_before_residual=True,
            norm_output=True,
            embedding_residual=True,
            own_output_rows=self.own_output_rows,
            sliding_window=self.sliding_window,
            rope_theta=self.rope_theta,
            rms_norm_eps=self.rms_norm_eps,
            max_positions=self.max_positions,
        )

    @property
    def target_hidden_size(self) -> int:
        """Return the width of the target's states and embeddings, which is the head's."""
        return self.hidden_size

    @property
    def kind(self) -> str:
        """Return the kind of head with its block size."""
        return f"block-{self.block_size}"

    @property
    def keys(self) -> KeyShape:
        """Return the shape of the keys of its layers."""
        return KeyShape(self.num_layers, self.num_kv_heads, self.head_dim, self.head_dim)

    @property
    def spec(self) -> DecoderSpec:
        """Return its layers as those of a decoder."""
        return layers_spec(self, head_norms=True)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return every trained tensor by name with its shape.

        The names are those that vLLM reads, and for what it cannot read, names of the same style.
        """
        slots = (self.block_size, self.hidden_size)
        tensors = (
            self.layer_of_pairs.tensors() | {"slot_embeddings.weight": slots, "slot_states.weight": slots}
            if self.context_tokens
            else _of_masks(self)
        )
        if self.markov_rank:
            rank = self.markov_rank
            hidden = self.hidden_size
            first = self.vocab_size
            second = self.draft_vocab_size
            tensors["markov_head.markov_w1.weight"] = (rank, hidden) if self.markov_shared else (first, rank)
            tensors["markov_head.markov_w2.weight"] = (hidden if self.markov_shared else second, rank)
        if self.confidence:
            tensors["confidence_head.proj.weight"] = (1, self.confidence_width)
            tensors["confidence_head.proj.bias"] = (1,)
        return tensors | bias_shapes(self, tensors)

    def extras(self) -> list[str]:
        """Return the features that not every block head has."""
        found = {
            f"{self.num_layers} layers": self.num_layers > 1,
            f"Markov bias of rank {self.markov_rank}": self.markov_rank > 0,
            "of the target's embeddings": self.markov_shared,
            "confidence": self.confidence,
            "tokens in its context": self.context_tokens,
            "drafts from the anchor": self.sample_from_anchor,
            "norms of states": self.norm_before_fc,
            "output rows of its own": self.own_output_rows,
            f"window of {self.sliding_window or 0:,}": self.sliding_window is not None,
            "biases": bool(self.biases),
            f"rotation {self.rope_scaling.get('rope_type')}": bool(self.rope_scaling),
        }
        return [name for name, holds in found.items() if holds]

    @property
    def num_slots(self) -> int:
        """Return the number of slots of a whole block."""
        return self.block_size + self.first_slot

    @property
    def first_slot(self) -> int:
        """Return the first slot that predicts."""
        return 0 if self.sample_from_anchor or self.context_tokens else 1

    @property
    def confidence_width(self) -> int:
        """Numbers that the confidence is estimated from."""
        return self.hidden_size + (self.markov_rank if self.confidence_with_markov else 0)


def _of_masks(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    tensors: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.layers) * hidden),
        "hidden_norm.weight": (hidden,),
    }
    for index in range(config.num_layers):
        layer = f"layers.{index}"
        tensors |= {f"{layer}.input_layernorm.weight": (hidden,), **layer_shapes(config.spec, layer, hidden)}
    tensors["norm.weight"] = (hidden,)
    if config.norm_before_fc:
        tensors |= {f"fc_norm.{i}.weight": (hidden,) for i in range(len(config.layers))}
    if config.mask_token_id is None:
        tensors["mask_embedding.weight"] = (hidden,)
    if config.own_output_rows:
        tensors["lm_head.weight"] = (config.draft_vocab_size, hidden)
    return tensors
