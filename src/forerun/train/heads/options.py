"""The options of `forerun train eagle`, `block`, `medusa` and `mtp`: every default, range and line of help."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.config import MAX_BLOCK_SIZE, OUTPUT_ROWS
from forerun.errors import ConfigError
from forerun.train import defaults
from forerun.train.defaults import BASE_WIDTH, Optimisation, RunOptions
from forerun.utils.fields import Checked, option

DECAY = "decay"
D_PACE = "d-pace"
ON_POLICY = "on-policy"
POSITION_WEIGHTS = (DECAY, D_PACE, ON_POLICY)
LOSSES = tuple(name for name in defaults.LOSSES if name != "kl-then-tv")
EVALUATED_TOKENS = 5
"""K of evaluations, of heads that draft as many."""
HEAD_OPTIMISATION = Optimisation(
    matrices="adam", adam_lr=3e-3, weight_decay=0.05, decay=1.0, final_factor=0.01, shape="cosine"
)


def layer_numbers(text: str) -> tuple[int, ...]:
    """Parse layers of the target, such as "3,15,27,30"; an empty text gives none.

    Raises:
        ConfigError: it is no list of numbers.
    """
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"layers is {text!r}, but must be whole numbers, such as 3,15,27,30.") from None


@dataclass(frozen=True, slots=True)
class HeadTraining(RunOptions):
    """Options of the training of every head."""

    optimisation: Optimisation = HEAD_OPTIMISATION
    epochs: float = option(1.0, "Times that the data is read.", low=0, above=True)
    max_steps: int = 0
    """Steps at most; 0 for no limit."""
    tokens_per_step: int = 1_024
    """Tokens of one step, those of the prompts included."""
    window: int = option(512, "Tokens of a row into which answers are packed.", low=8)
    learning_rate: float | None = option(
        None,
        "Peak learning rate.",
        low=0,
        above=True,
        default_text=f"{HEAD_OPTIMISATION.adam_lr:g}, less for targets wider than {BASE_WIDTH}",
    )
    loss: str = option(
        "forward-kl", f"What is learnt from the target's distribution: {', '.join(LOSSES)}.", choices=LOSSES
    )
    position_weights: str = option(
        DECAY,
        "What weighs the tokens of a draft: decay (less and less), d-pace (what more acceptance there would add to "
        "the expected length), or on-policy (the probability that the head's own draft gets there).",
        metavar="NAME",
        choices=POSITION_WEIGHTS,
    )
    evaluate_every: int = 500
    """Steps between evaluations on held-out rows; 0 for none."""
    patience: int = 0
    """Evaluations without a better one after which the run ends; 0 to go on."""
    held_out_rows: int = 48
    """Held-out rows of an evaluation during the run."""
    num_draft_tokens: int | None = None
    """K of the evaluations; None: EVALUATED_TOKENS, or as many as the head drafts, if these are fewer."""
    cached_states: float = option(0.0, "GB of the target's states kept in the run's folder for later epochs.", low=0)


@dataclass(frozen=True, slots=True)
class LayerShape(Checked):
    """Sizes of a head with decoder layers; those that are 0 are the target's."""

    layers: str = option(
        "", "States to fuse, by the layers they enter, with commas.", default_text="spread over the target's"
    )
    draft_vocab: int = option(8_000, "Tokens that the head can propose: the most frequent ones.", low=1)
    intermediate_size: int = 0
    """Width of the feed-forward part."""
    sliding_window: int = option(
        512,
        "Positions that a row or a block attends to; 0 for all: programs other than forerun can read block heads of "
        "these alone.",
        low=0,
    )
    own_output_rows: bool = False
    """Train an output layer, in place of the target's rows."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        layer_numbers(self.layers)


@dataclass(frozen=True, slots=True)
class EagleShape(LayerShape):
    """The shape of the head; sizes that are 0 are the target's."""

    version: int = option(3, "Version of EAGLE: 3 fuses several states of the target, 1 reads the last.")
    plain_residual: bool = option(
        False, "Add no linear map of the embedding to the residual: programs other than forerun cannot read it."
    )
    is_mtp: bool = False
    """An MTP layer, which is a whole decoder layer of version 1."""

    def __post_init__(self) -> None:
        LayerShape.__post_init__(self)
        if self.version not in (1, 3):
            raise ConfigError(
                f"version is {self.version}, but must be 1 or 3: EAGLE-2 drafts trees with a head of version 1 or 3."
            )


@dataclass(frozen=True, slots=True)
class EagleTraining(HeadTraining):
    """`forerun train eagle`: a head that reads the target's states."""

    shape: EagleShape = field(default_factory=EagleShape)
    unroll: int = option(3, "Steps that are unrolled, each on the head's output of the one before.", low=1, high=16)
    step_weight: float = 0.8
    """Weight of each unrolled step over that of the one before."""
    feature_weight: float = 0.0
    """Weight of the distance to the target's next state (version 1)."""

    def __post_init__(self) -> None:
        HeadTraining.__post_init__(self)
        if self.feature_weight and self.shape.version != 1:
            raise ConfigError(
                "feature_weight is for version 1: the output of version 3 stands for no state of the target."
            )


MTP_SHAPE = EagleShape(version=1, is_mtp=True)
MTP_TRAINING = EagleTraining(shape=MTP_SHAPE, step_weight=0.6)
"""The weight is FastMTP's (2509.18362)."""


@dataclass(frozen=True, slots=True)
class BlockShape(LayerShape):
    """The shape of the head; sizes that are 0 are the target's."""

    block_size: int = option(5, "Tokens that one pass drafts.", low=1, high=MAX_BLOCK_SIZE)
    num_layers: int = option(1, "Layers of the head.", low=1)
    markov_rank: int = option(64, "Rank of the bias by the token before; 0 for none.", low=0)
    markov_shared: bool = option(
        False,
        "Make that bias of the target's embeddings and the output rows, by two small matrices in place of a row for "
        "each token: programs other than forerun cannot read it.",
    )
    confidence: bool = option(False, "Train an estimate of the probability that a token is accepted.")
    sample_from_anchor: bool = option(False, "Let the slot of the last token draft too: one slot less a block.")
    context_tokens: bool = option(
        False,
        "Let every position of the context, and every slot, read the embedding of the token that follows beside the "
        "states, as EAGLE heads do: one layer, which programs other than forerun cannot read.",
    )
    mask_token: int | None = option(
        None,
        "Token whose embedding stands for the tokens to be drafted: programs other than forerun need one.",
        low=0,
        default_text="a vector that is learnt",
    )
    plain_states: bool = option(
        False, "Fuse the states without a norm of each: programs other than forerun can read these alone."
    )


@dataclass(frozen=True, slots=True)
class BlockTraining(HeadTraining):
    """`forerun train block`: a head that drafts a block in one pass."""

    shape: BlockShape = field(default_factory=BlockShape)
    start: str = option(
        "",
        "Folder of an EAGLE-3 head of the same target and sizes, whose layer a head with context_tokens begins as.",
        metavar="FOLDER",
        default_text="random weights",
    )
    anchors: int = 128
    """Blocks that are learnt of each row, at random places."""
    gamma: float = 4.0
    """Token k weighs exp(-(k - 1) / gamma), if weights decay."""


@dataclass(frozen=True, slots=True)
class MedusaShape(Checked):
    """The shape of the heads, which are as wide as the target's states."""

    num_heads: int = option(5, "Heads, which is how many tokens they draft.", low=1, high=32)
    num_layers: int = 1
    """Layers of each head."""
    draft_vocab: int = option(8_000, "Tokens that the heads can propose: the most frequent ones.", low=1)
    sequential: bool = option(
        False,
        "Let each head read the tokens before the one that it predicts (Hydra's order): programs other than forerun "
        "cannot read such heads.",
    )
    output_rows: str = option(
        "target",
        "Output layer: the target's rows, one of their own for all heads (one), or one for each.",
        metavar="NAME",
        choices=OUTPUT_ROWS,
    )


@dataclass(frozen=True, slots=True)
class MedusaTraining(HeadTraining):
    """`forerun train medusa`: heads that each predict one token further on."""

    shape: MedusaShape = field(default_factory=MedusaShape)
    step_weight: float = 0.8
    """Weight of each head over that of the one before."""

    def __post_init__(self) -> None:
        HeadTraining.__post_init__(self)
        if self.position_weights != DECAY and self.shape.output_rows == "each":
            raise ConfigError(
                f"position_weights {self.position_weights} needs one output layer. Set output_rows to target or one."
            )
