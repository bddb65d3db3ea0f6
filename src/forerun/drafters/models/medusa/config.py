"""The configuration of Medusa heads (Cai et al., 2401.10774), also in Hydra's order (Ankner et al., 2402.05109)."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.config import OUTPUT_ROWS
from forerun.drafters.models.heads.config import KeyShape, check_positive, check_vocabulary
from forerun.errors import ConfigError

RANKS = 8
"""Ranks whose accuracy is kept for each head."""


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Heads that read the target's last state, after its final norm, and each predict one token further on.

    Head k (from 0) at the state of token t computes, layer by layer, x + SiLU(W x + b) from x = state, and its output
    rows give the logits of token t + 2 + k. Sequential heads (Hydra's order) also read the tokens between: the first
    layer of head k is state + SiLU(W [state; e(t + 1); ...; e(t + 1 + k)] + b), where e is the target's embedding over
    its root mean square.

    Attributes:
        vocab_size: of the target.
        draft_vocab_size: tokens that the heads can propose; vocab_size for all of them.
        target_hidden_size: of the target's states, and of the heads.
        num_heads: tokens that they draft.
        layers: the number of the target's layers alone, which stands for the state after its final norm.
        num_layers: of each head.
        sequential: the heads are in Hydra's order. No public form can represent it.
        output_rows: "target": those of its output layer; "one": rows of their own, the same for all (lm_head);
            "each": for each head its own (lm_heads.K).
        accuracies: [num_heads * RANKS] how often the token that came was the one of each rank, given that those before
            it were among the first RANKS; of head 0 first. Empty if not measured.
    """

    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    num_heads: int
    layers: tuple[int, ...]
    num_layers: int = 1
    sequential: bool = False
    output_rows: str = "target"
    accuracies: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_positive(
            "the Medusa heads",
            vocab_size=self.vocab_size,
            draft_vocab_size=self.draft_vocab_size,
            target_hidden_size=self.target_hidden_size,
            num_heads=self.num_heads,
            num_layers=self.num_layers,
        )
        check_vocabulary(self.draft_vocab_size, self.vocab_size, "the heads have", "their")
        if len(self.layers) != 1:
            raise ConfigError(f"layers of Medusa heads are {list(self.layers)}, but they read one state.")
        if self.output_rows not in OUTPUT_ROWS:
            raise ConfigError(f"output_rows is {self.output_rows!r}, but must be one of {', '.join(OUTPUT_ROWS)}.")
        if self.accuracies and (
            len(self.accuracies) != self.num_heads * RANKS or not all(0 <= each <= 1 for each in self.accuracies)
        ):
            raise ConfigError(
                f"accuracies must be {RANKS} numbers in 0..1 for each of {self.num_heads} heads, or none."
            )

    @property
    def kind(self) -> str:
        """Return the kind of heads."""
        return "Hydra" if self.sequential else "Medusa"

    @property
    def keys(self) -> KeyShape:
        """Return an empty shape: the heads attend to nothing."""
        return KeyShape(0, 0, 0, 0)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return every trained tensor by name with its shape. The names are those that vLLM reads."""
        hidden = self.target_hidden_size
        tensors: dict[str, tuple[int, ...]] = {}
        for head in range(self.num_heads):
            for layer in range(self.num_layers):
                embeddings = head + 1 if self.sequential and not layer else 0
                tensors[f"blocks.{head}.layers.{layer}.weight"] = (hidden, hidden * (1 + embeddings))
                tensors[f"blocks.{head}.layers.{layer}.bias"] = (hidden,)
        if self.output_rows == "one":
            tensors["lm_head.weight"] = (self.draft_vocab_size, hidden)
        if self.output_rows == "each":
            tensors |= {f"lm_heads.{head}.weight": (self.draft_vocab_size, hidden) for head in range(self.num_heads)}
        return tensors

    def extras(self) -> list[str]:
        """Return the features that not all Medusa heads have."""
        has = [f"{self.num_heads} heads of {self.num_layers} layer{'s' if self.num_layers > 1 else ''}"]
        has += ["output rows of their own"] * (self.output_rows != "target")
        return has + ["accuracies for a tree"] * bool(self.accuracies)
