"""Every default of the training commands, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


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
    """Share of the files that carry repeated and edited spans, drawn anew in each epoch."""
    rename_share: float = 0.0
    """Share of the files in which names are replaced, drawn anew in each epoch."""
    seed: int = 0
    checkpoint_seconds: float = 180.0
    threads: int = 0
    """0 = PyTorch's own choice."""


DRAFT_ARCHITECTURE = Architecture(
    hidden_size=160, num_layers=2, num_heads=5, num_kv_heads=5, head_dim=32, intermediate_size=256
)
"""Two layers, because copying takes two: one attends to the token before, the other finds where it stood
earlier. With one layer of 192, slightly more parameters, and more steps, the acceptance rate at K=4 was
0.32 instead of 0.58 at temperature 0, and 0.28 instead of 0.36 at temperature 1."""


OTHER_VOCAB_ARCHITECTURE = replace(DRAFT_ARCHITECTURE, vocab_size=3_072)


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
    own_prompt_share: float = 0.0
    """Share of the prompts that the target itself wrote, at temperature 1, from their 33rd token on."""
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


def _other_vocab_text() -> LmTraining:
    return LmTraining(architecture=OTHER_VOCAB_ARCHITECTURE, tokens=10_000_000)


@dataclass(frozen=True, slots=True)
class OtherVocabTraining:
    """`forerun train other-vocab`: a draft with a tokenizer of its own, on text and the target's samples."""

    text: LmTraining = field(default_factory=_other_vocab_text)
    read_tokens: int = 20_000_000
    """Tokens of the target's samples that are read, at most."""
    sampling: DraftTraining = field(default_factory=DraftTraining)
    """How samples are drawn where there are none."""
