"""The options of the training commands, with every default, range and line of help."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from forerun.errors import ConfigError
from forerun.utils.device import DEVICES
from forerun.utils.fields import Checked, check_options, option

AUTO = "auto"
FORMATS = (AUTO, "float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of every training run. Raises ConfigError, see `check_options`."""

    seed: int = option(0, "Seed of weights, order and noise.", low=0)
    checkpoint_seconds: float = option(60.0, "Seconds of training between checkpoints.", low=0)
    threads: int = option(0, "CPU threads; 0 takes as many as PyTorch finds.", low=0)
    device: str | None = option(None, f"Where to compute: {DEVICES}.", default_text="CUDA if it is there, else the CPU")
    dtype: str = option(
        AUTO,
        "Number format of products: float32, bfloat16, or auto: what the device is quick at. A resumed run keeps its "
        "own.",
        metavar="DTYPE",
        choices=FORMATS,
    )
    minutes: float | None = option(
        None,
        "Minutes of training, without loading and evaluation: the steps that fit into them are decided by the first "
        "ones, and a resumed run keeps them.",
        low=0,
        above=True,
        default_text="no limit",
    )

    def __post_init__(self) -> None:
        check_options(self, ConfigError)

    def end(self) -> float:
        """Return when training that is begun now has to end, on the clock of time.monotonic."""
        return time.monotonic() + 60 * self.minutes if self.minutes else math.inf


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
    """Optimiser of the hidden matrices: "muon", or "adam" as everything else."""
    shape: str = "linear"
    """Shape of the decay: "linear" or "cosine"."""


WARMUP_STEPS = 40
"""Steps over which the learning rate of a head or a draft rises, at least."""
BASE_WIDTH = 576
"""Inputs of the matrices for which the default rates were found: SmolLM2's hidden size."""
_LOWEST_RATE = 1e-4
"""SpecForge's rate of EAGLE-3 heads, at 4,096 inputs."""


def rate_for_width(width: int, rate: float) -> float:
    """Return the peak learning rate for matrices of so many inputs: `rate` up to BASE_WIDTH, beyond it less by 1/width.

    So is Adam's step of hidden matrices in muP (2203.03466). From 3e-3 it gives 6.8e-4 at 2,560 inputs, where DeepSpec
    has 6e-4 for DSpark and DFlash.
    """
    return float(f"{max(min(rate, _LOWEST_RATE), rate * min(1.0, BASE_WIDTH / width)):.2g}")


DRAFT_RATE = 5e-4
FITTED_RATE = 5e-5
"""At 3e-4 the loss of a fitted draft rises from the first steps on."""
LossName = Literal[
    "kl-then-tv", "forward-kl", "reverse-kl", "jensen-shannon", "total-variation", "hybrid", "log-overlap"
]
LOSSES: tuple[str, ...] = get_args(LossName)
"""Losses of distillation (`losses.py`); `kl-then-tv` is forward KL first and total variation later."""
CHANNEL_SCORES = ("activation", "weight")
"""Measures that rank the feed-forward channels of a pruned copy (`prune.py`)."""


@dataclass(frozen=True, slots=True)
class Pruning(Checked):
    """What is left out of the model that a draft starts from."""

    layers: str | None = option(
        None,
        "Keep so many layers of the start, those that change its output most, or these, such as 0,1,28,29.",
        flags=("--layers",),
        metavar="INT,...",
        default_text="all",
    )
    width: int | None = option(
        None,
        "Feed-forward channels to keep in each layer; of the Llama family alone.",
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
            raise ConfigError(f"prune_by is {self.by!r}, but must be one of {', '.join(CHANNEL_SCORES)}.")


@dataclass(frozen=True, slots=True)
class DraftTraining(RunOptions):
    """Options of `forerun train draft`: distillation from the target's soft labels of packed rows."""

    learning_rate: float | None = option(
        None,
        "Peak learning rate.",
        low=0,
        above=True,
        default_text=f"{FITTED_RATE:g} for a draft that is fitted to its start, else {DRAFT_RATE:g}",
    )
    window: int = option(512, "Tokens of a row into which answers are packed.", low=8)
    top: int = 32
    """Tokens of each of the target's distributions that are kept."""
    tokens: int = option(10_000_000, "Tokens of training, counted with repetitions.", low=1)
    tokens_per_step: int = 2_048
    loss: str = option(
        "kl-then-tv",
        f"What it is distilled by: {', '.join(LOSSES)}.",
        metavar="LOSS",
        choices=LOSSES,
    )
    variation_from: float = 0.5
    """Share of the distillation after which total variation takes over from forward KL, of `kl-then-tv`."""
    pruning: Pruning = field(default_factory=Pruning)
    output_tokens: int | None = option(
        None,
        "Tokens that the draft can propose: those that the answers hold most often.",
        low=1,
        default_text="all of a vocabulary of up to 65,535, else 16,384",
    )
    parallel: int | None = option(
        None,
        "Tokens that the draft learns to draft in one forward, by mask tokens (PARD); its configuration names the "
        "token that it reads as a mask.",
        low=2,
        high=64,
        default_text="one",
    )

    @property
    def optimisation(self) -> Optimisation:
        """Return the options of its optimisers: Muon's products would cost more than those of a small batch."""
        rate = self.learning_rate or DRAFT_RATE
        return Optimisation(adam_lr=rate, matrices="adam", warmup=0.03, decay=0.97, shape="cosine", weight_decay=0.0)


@dataclass(frozen=True, slots=True)
class AnswerMaking(Checked):
    """Options of `forerun train answers`: prompts, and the target's answers to them."""

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
    max_batch: int = 128
    """Sequences computed together."""
    seed: int = 0
    """Seed of the draws."""
