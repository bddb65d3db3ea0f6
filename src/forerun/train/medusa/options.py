"""What `forerun train medusa` may be told, with every default, range and line of help."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.config import OUTPUT_ROWS
from forerun.errors import ConfigError
from forerun.fields import Checked, option
from forerun.train.heads.options import DECAY, HeadTraining


@dataclass(frozen=True, slots=True)
class MedusaShape(Checked):
    """The shape of the heads, which are as wide as the target's states."""

    num_heads: int = option(5, "Heads, which is how many tokens they draft.", low=1, high=32)
    num_layers: int = option(1, "Layers of each head.", low=1)
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
    )

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.output_rows not in OUTPUT_ROWS:
            raise ConfigError(f"output_rows is {self.output_rows!r}, but must be one of {', '.join(OUTPUT_ROWS)}.")


@dataclass(frozen=True, slots=True)
class MedusaTraining(HeadTraining):
    """`forerun train medusa`: heads that each predict one token further on."""

    shape: MedusaShape = field(default_factory=MedusaShape)
    step_weight: float = option(0.8, "Weight of each head over that of the one before.", low=0, above=True)

    def __post_init__(self) -> None:
        HeadTraining.__post_init__(self)
        if self.position_weights != DECAY and self.shape.output_rows == "each":
            raise ConfigError(
                f"position_weights {self.position_weights} needs one output layer. Set output_rows to target or one."
            )
