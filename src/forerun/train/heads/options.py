"""What the training of every head may be told, with every default, range and line of help."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.device import DEVICES
from forerun.errors import ConfigError
from forerun.fields import Checked, option
from forerun.train import defaults
from forerun.train.defaults import Optimisation

DECAY, D_PACE, ON_POLICY = "decay", "d-pace", "on-policy"
POSITION_WEIGHTS = (DECAY, D_PACE, ON_POLICY)
LOSSES = tuple(name for name in defaults.LOSSES if name != "kl-then-tv")
EVALUATED_TOKENS = 5
"""K of evaluations, of heads that draft as many."""
HEAD_OPTIMISATION = Optimisation(
    matrices="adam", adam_lr=3e-3, weight_decay=0.05, decay=1.0, final_factor=0.01, shape="cosine"
)


def layer_numbers(text: str) -> tuple[int, ...]:
    """Layers of the target as they are written; none of an empty text.

    Raises:
        ConfigError: it is no list of numbers.
    """
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"layers is {text!r}, but must be whole numbers, such as 3,15,27,30.") from None


@dataclass(frozen=True, slots=True)
class HeadTraining(Checked):
    """What the training of every head may be told."""

    optimisation: Optimisation = HEAD_OPTIMISATION
    epochs: float = option(1.0, "Times that the data is read.", low=0, above=True)
    max_steps: int = option(0, "Steps at most; 0 for no limit.", low=0)
    tokens_per_step: int = option(1_024, "Tokens of one step, those of the prompts included.", low=1)
    window: int = option(512, "Tokens of a row into which answers are packed.", low=8)
    learning_rate: float = option(3e-3, "Peak learning rate.", low=0, above=True)
    warmup_steps: int = option(40, "Steps over which the learning rate rises.", low=0)
    weight_decay: float = option(0.05, "Weight decay of the matrices.", low=0)
    loss: str = option("forward-kl", f"What is learnt from the target's distribution: {', '.join(LOSSES)}.")
    position_weights: str = option(
        DECAY,
        "What weighs the tokens of a draft: decay (less and less), d-pace (what more acceptance there would add to "
        "the expected length), or on-policy (the chance that a draft of the head's own gets there).",
        metavar="NAME",
    )
    dropout: float = option(0.1, "Share of the target's states' elements that are dropped.", low=0, high=0.9)
    noise: float = option(0.1, "Uniform noise on the target's normalised states, up to this size.", low=0)
    evaluate_every: int = option(500, "Steps between evaluations on held-out rows; 0 for none.", low=0)
    patience: int = option(0, "Evaluations without a better one after which the run ends; 0 to go on.", low=0)
    held_out_rows: int = option(48, "Held-out rows of an evaluation during the run.", low=1)
    num_draft_tokens: int | None = option(
        None,
        "K of the evaluations.",
        low=1,
        high=32,
        flags=("--num-draft-tokens", "-k"),
        default_text=f"{EVALUATED_TOKENS}, or as many as the head drafts, if these are fewer",
    )
    cached_states: float = option(0.0, "GB of the target's states kept in the run's folder for later epochs.", low=0)
    seed: int = option(0, "Seed of weights, order and noise.", low=0)
    checkpoint_seconds: float = option(60.0, "Seconds of training between checkpoints.", low=0)
    threads: int = option(0, "CPU threads; 0 takes as many as PyTorch finds.", low=0)
    device: str | None = option(None, f"Where to compute: {DEVICES}.", default_text="CUDA if it is there, else the CPU")

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.loss not in LOSSES:
            raise ConfigError(f"loss is {self.loss!r}, but must be one of {', '.join(LOSSES)}.")
        if self.position_weights not in POSITION_WEIGHTS:
            raise ConfigError(
                f"position_weights is {self.position_weights!r}, but must be one of {', '.join(POSITION_WEIGHTS)}."
            )
