"""What `forerun train eagle` may be told, with every default, range and line of help."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.errors import ConfigError
from forerun.fields import Checked, option
from forerun.train.heads.options import HeadTraining, layer_numbers


@dataclass(frozen=True, slots=True)
class EagleShape(Checked):
    """The shape of the head; sizes that are 0 are the target's."""

    version: int = option(3, "Version of EAGLE: 3 fuses several states of the target, 1 reads the last.", low=1, high=3)
    layers: str = option(
        "", "States to fuse, by the layers they enter, with commas.", default_text="spread over the target's"
    )
    draft_vocab: int = option(8_000, "Tokens that the head can propose: the most frequent ones.", low=1)
    intermediate_size: int = option(0, "Width of the feed-forward part.", low=0)
    num_heads: int = option(0, "Attention heads.", low=0)
    num_kv_heads: int = option(0, "Heads of keys and values.", low=0)
    head_dim: int = option(0, "Width of a head.", low=0)
    sliding_window: int = option(512, "Rows that a row attends to; 0 for all.", low=0)
    plain_residual: bool = option(
        False, "Add no linear map of the embedding to the residual: programs other than forerun cannot read it."
    )
    own_output_rows: bool = option(False, "Train an output layer, in place of the target's rows.")
    is_mtp: bool = False
    """An MTP layer, which is a whole decoder layer of version 1."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.version == 2:
            raise ConfigError("version is 2, but must be 1 or 3: EAGLE-2 drafts trees with a head of version 1 or 3.")
        self.chosen_layers()

    def chosen_layers(self) -> tuple[int, ...]:
        """`layers` as numbers; none where they are to be chosen.

        Raises:
            ConfigError: it is no list of numbers.
        """
        return layer_numbers(self.layers)


@dataclass(frozen=True, slots=True)
class EagleTraining(HeadTraining):
    """`forerun train eagle`: a head that reads the target's states."""

    shape: EagleShape = field(default_factory=EagleShape)
    unroll: int = option(3, "Steps that are unrolled, each on the head's output of the one before.", low=1, high=16)
    step_weight: float = option(0.8, "Weight of each unrolled step over that of the one before.", low=0, above=True)
    feature_weight: float = option(0.0, "Weight of the distance to the target's next state (version 1).", low=0)

    def __post_init__(self) -> None:
        HeadTraining.__post_init__(self)
        if self.feature_weight and self.shape.version != 1:
            raise ConfigError(
                "feature_weight is for version 1: the output of version 3 stands for no state of the target."
            )


MTP_SHAPE = EagleShape(version=1, is_mtp=True)
MTP_TRAINING = EagleTraining(shape=MTP_SHAPE, step_weight=0.6)
"""The weight is FastMTP's (2509.18362)."""
