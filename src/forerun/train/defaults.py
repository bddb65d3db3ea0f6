"""Every default of the training commands, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Optimisation:
    """Peak learning rates and the shape of the schedule; shares are of the whole run."""

    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip: float = 1.0
    warmup: float = 0.02
    decay: float = 0.8
    final_factor: float = 0.02


@dataclass(frozen=True, slots=True)
class Architecture:
    """A Llama of these sizes; embeddings are tied."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 16
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 704
    context: int = 2048
    rope_theta: float = 10_000.0


@dataclass(frozen=True, slots=True)
class LmTraining:
    """`forerun train lm`: a causal language model on the text of files."""

    architecture: Architecture = field(default_factory=Architecture)
    optimisation: Optimisation = field(default_factory=Optimisation)
    tokens: int = 6_000_000
    tokens_per_step: int = 8_192
    short_window: int = 512
    long_window: int = 2_048
    long_share: float = 0.15
    copy_share: float = 0.10
    seed: int = 0
    checkpoint_seconds: float = 180.0
    threads: int = 0
    """0 = PyTorch's own choice."""


DRAFT_ARCHITECTURE = Architecture(
    hidden_size=192, num_layers=1, num_heads=3, num_kv_heads=3, head_dim=64, intermediate_size=512
)
"""One layer: on a CPU each layer of a draft costs as much as 200 of its hidden units."""


def _draft_text() -> LmTraining:
    return LmTraining(architecture=DRAFT_ARCHITECTURE, tokens=2_000_000)


def _distillation() -> Optimisation:
    return Optimisation(muon_lr=0.01, adam_lr=2e-3, warmup=0.02, decay=0.9, weight_decay=0.0)


@dataclass(frozen=True, slots=True)
class DraftTraining:
    """`forerun train draft`: on text first, then on the target's own samples."""

    text: LmTraining = field(default_factory=_draft_text)
    distillation: Optimisation = field(default_factory=_distillation)
    sample_tokens: int = 400_000
    """Tokens the target writes; the prompts they continue are learnt from as well."""
    sample_batch: int = 128
    prompt_lengths: tuple[int, ...] = (128, 256, 384)
    new_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 1.0)
    text_law_tokens: int = 2_200_000
    """Tokens of training text that the target only reads: three times cheaper than those it writes."""
    text_window: int = 384
    text_batch: int = 64
    top: int = 32
    """Tokens of each of the target's laws that are kept."""
    tokens: int = 10_000_000
    """Tokens of distillation, counted with repetitions."""
    tokens_per_step: int = 8_192
    variation_from: float = 0.5
    """Share of the distillation after which total variation takes over from forward KL."""
    seed: int = 0
    checkpoint_seconds: float = 60.0
    threads: int = 0
