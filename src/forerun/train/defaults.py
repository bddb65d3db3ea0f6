"""What the training commands may be told, with every default, range and line of help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from forerun.device import DEVICES
from forerun.errors import ConfigError
from forerun.fields import Checked, option

_SEED = "Seed of weights, order and samples."
_THREADS = "CPU threads; 0 takes as many as PyTorch finds."
_DEVICE = f"Where to compute: {DEVICES}."
_DEVICE_DEFAULT = "CUDA if it is there, else the CPU"
_CHECKPOINT_SECONDS = "Seconds of training between checkpoints."
_TOKENS_PER_STEP = "Tokens of one step."


@dataclass(frozen=True, slots=True)
class Optimisation(Checked):
    """Peak learning rates and the shape of the schedule; shares are of the whole run."""

    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = option(0.01, "Weight decay of the hidden matrices.", low=0)
    clip: float = 1.0
    warmup: float = 0.02
    decay: float = 0.8
    final_factor: float = 0.02
    matrices: str = "muon"
    """What steps the hidden matrices: "muon", or "adam" as everything else."""
    shape: str = "linear"
    """Of the decay: "linear" or "cosine"."""


@dataclass(frozen=True, slots=True)
class Architecture(Checked):
    """A Llama of these sizes; embeddings are tied."""

    vocab_size: int = option(4096, "Tokens of its tokenizer.", low=257)
    hidden_size: int = option(256, "Width of the states between layers.", low=1)
    num_layers: int = option(16, "Decoder layers.", low=1)
    num_heads: int = option(4, "Attention heads of a layer.", low=1)
    num_kv_heads: int = option(2, "Heads of keys and values of a layer.", low=1)
    head_dim: int = option(64, "Width of a head.", low=1)
    intermediate_size: int = option(704, "Width of the feed-forward part.", low=1)
    context: int = 2048
    rope_theta: float = 10_000.0


@dataclass(frozen=True, slots=True)
class LmTraining(Checked):
    """`forerun train lm`: a causal language model on the text of files."""

    architecture: Architecture = field(default_factory=Architecture)
    optimisation: Optimisation = field(default_factory=Optimisation)
    tokens: int = option(6_000_000, "Tokens of text to train on.", low=1)
    tokens_per_step: int = option(8_192, _TOKENS_PER_STEP, low=1)
    short_window: int = option(512, "Tokens of a window at first.", low=8)
    long_window: int = 2_048
    long_share: float = option(0.15, "Last part of the run, in long windows.", low=0, high=1)
    copy_share: float = option(
        0.1, "Share of the files with repeated and edited spans, drawn anew in each epoch.", low=0, high=1
    )
    rename_share: float = option(
        0.0, "Share of the files in which names are replaced, drawn anew in each epoch.", low=0, high=1
    )
    seed: int = option(0, _SEED, low=0)
    checkpoint_seconds: float = option(180.0, _CHECKPOINT_SECONDS, low=0)
    threads: int = option(0, _THREADS, low=0)
    device: str | None = option(None, _DEVICE, default_text=_DEVICE_DEFAULT)


DRAFT_ARCHITECTURE = Architecture(
    hidden_size=160, num_layers=2, num_heads=5, num_kv_heads=5, head_dim=32, intermediate_size=256
)
"""Two layers, because copying takes two: one attends to the token before, the other finds where it stood
earlier. With one layer of 192, slightly more parameters, and more steps, the acceptance rate at K=4 was
0.32 instead of 0.58 at temperature 0, and 0.28 instead of 0.36 at temperature 1."""
OTHER_VOCAB_ARCHITECTURE = replace(DRAFT_ARCHITECTURE, vocab_size=3_072)
DRAFT_TEXT = LmTraining(architecture=DRAFT_ARCHITECTURE, tokens=2_000_000)
OTHER_VOCAB_TEXT = LmTraining(architecture=OTHER_VOCAB_ARCHITECTURE, tokens=10_000_000)
DISTILLATION = Optimisation(muon_lr=0.01, adam_lr=2e-3, warmup=0.02, decay=0.9, weight_decay=0.0)

LossName = Literal[
    "kl-then-tv", "forward-kl", "reverse-kl", "jensen-shannon", "total-variation", "hybrid", "log-overlap"
]
LOSSES: tuple[str, ...] = get_args(LossName)
"""What a draft may be distilled by (`losses.py`); `kl-then-tv` is forward KL first and total variation later."""
CHANNEL_SCORES = ("activation", "weight")
"""What decides which channels of the feed-forward part a pruned copy keeps (`prune.py`)."""


@dataclass(frozen=True, slots=True)
class Pruning(Checked):
    """The pruned copy of its target that a draft starts from; without layers it starts from something else."""

    layers: str | None = option(
        None,
        "Start from a copy of the target with these of its layers, such as 0,1,28,29, instead of a stage on text.",
        flags=("--prune-layers",),
        metavar="INT,...",
    )
    width: int | None = option(
        None,
        "Feed-forward channels that such a copy keeps in each layer.",
        low=1,
        flags=("--prune-width",),
        default_text="all",
    )
    by: str = option(
        "activation",
        "What ranks these channels: activation (what they add to the residual, on training text) or weight.",
        flags=("--prune-by",),
        metavar="MEASURE",
    )

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.by not in CHANNEL_SCORES:
            raise ConfigError(f"--prune-by is {self.by!r}, but must be one of {', '.join(CHANNEL_SCORES)}.")
        if self.layers is None and self.width is not None:
            raise ConfigError("--prune-width has no effect without --prune-layers. Say which layers to keep.")


@dataclass(frozen=True, slots=True)
class DraftTraining(Checked):
    """`forerun train draft`: on text first, then on the target's own samples."""

    text: LmTraining = DRAFT_TEXT
    distillation: Optimisation = DISTILLATION
    sample_tokens: int = option(
        400_000, "Tokens the target writes; the prompts they continue are learnt from as well.", low=1
    )
    sample_batch: int = option(128, "Prompts continued together.", low=1)
    prompt_lengths: tuple[int, ...] = (128, 256, 384)
    new_tokens: int = option(128, "Tokens a prompt is continued by.", low=1)
    own_prompt_share: float = option(
        0.0, "Share of the prompts that the target itself wrote, at temperature 1, from token 33 on.", low=0, high=1
    )
    temperatures: tuple[float, ...] = (0.0, 1.0)
    text_law_tokens: int = option(
        2_200_000,
        "Tokens of training text that the target only reads: three times cheaper than those it writes.",
        low=0,
    )
    text_window: int = 384
    text_batch: int = 64
    top: int = 32
    """Tokens of each of the target's distributions that are kept."""
    tokens: int = option(10_000_000, "Tokens of distillation, counted with repetitions.", low=1)
    tokens_per_step: int = option(8_192, _TOKENS_PER_STEP, low=1)
    loss: str = option(
        "kl-then-tv",
        f"What it is distilled by: {', '.join(LOSSES)}.",
        metavar="LOSS",
    )
    variation_from: float = 0.5
    """Share of the distillation after which total variation takes over from forward KL, of `kl-then-tv`."""
    pruning: Pruning = field(default_factory=Pruning)
    output_tokens: int | None = option(
        None,
        "Tokens that the draft can propose: those that the target gives most probability in the samples.",
        low=1,
        default_text="all of the vocabulary",
    )
    seed: int = option(0, _SEED, low=0)
    checkpoint_seconds: float = option(60.0, _CHECKPOINT_SECONDS, low=0)
    threads: int = option(0, _THREADS, low=0)
    device: str | None = option(None, _DEVICE, default_text=_DEVICE_DEFAULT)

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.loss not in LOSSES:
            raise ConfigError(f"--loss is {self.loss!r}, but must be one of {', '.join(LOSSES)}.")


OTHER_VOCAB_SAMPLING = DraftTraining(text_law_tokens=0)


@dataclass(frozen=True, slots=True)
class OtherVocabTraining(Checked):
    """`forerun train other-vocab`: a draft with a tokenizer of its own, on text and the target's samples."""

    text: LmTraining = OTHER_VOCAB_TEXT
    read_tokens: int = option(20_000_000, "Tokens of the target's samples that are read, at most.", low=1)
    sampling: DraftTraining = OTHER_VOCAB_SAMPLING
    """How samples are drawn where there are none."""


@dataclass(frozen=True, slots=True)
class AnswerMaking(Checked):
    """`forerun train answers`: prompts, and the target's answers to them."""

    answers: int | None = option(
        None, "Answers to make, at most.", low=1, default_text="one for each prompt that is given, else 2000"
    )
    max_tokens: int = option(128, "Tokens of an answer at most.", low=1)
    sampled_share: float = option(
        0.5, "Share of the answers that are drawn at temperature 1; the others are greedy.", low=0, high=1
    )
    mixture_share: float | None = option(
        None,
        "Share of the answers that are to prompts made of text by templates; of chat models only.",
        low=0,
        high=1,
        default_text="0 where prompts are given, else 0.4",
    )
    kind: Sequence[str] = option(
        (),
        "Kind of prompts made by templates: translation, summary, retrieval, editing, extraction, continuation, code. "
        "All without it.",
        metavar="KIND",
    )
    language: str = option(
        "en", "Of the prompts that the target writes: en keeps English ones alone, any keeps all.", metavar="LANGUAGE"
    )
    evaluation: Sequence[str] = option(
        (),
        "Workload or JSONL file that the drafter will be measured on, beside the bundled ones: prompts and answers "
        "that share 13 words in a row with it are left out.",
        metavar="WORKLOAD",
    )
    keep_overlap: bool = option(False, "Keep prompts that share 13 words in a row with those for evaluation.")
    max_batch: int = option(128, "Sequences computed together.", low=1)
    seed: int = option(0, _SEED, low=0)
