"""What `forerun train block` may be told, with every default, range and line of help."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.config import MAX_BLOCK_SIZE
from forerun.fields import Checked, option
from forerun.train.heads.options import HeadTraining, layer_numbers


@dataclass(frozen=True, slots=True)
class BlockShape(Checked):
    """The shape of the head; sizes that are 0 are the target's."""

    block_size: int = option(5, "Tokens that one pass drafts.", low=1, high=MAX_BLOCK_SIZE)
    num_layers: int = option(1, "Layers of the head.", low=1)
    layers: str = option(
        "", "States to fuse, by the layers they enter, with commas.", default_text="spread over the target's"
    )
    draft_vocab: int = option(8_000, "Tokens that the head can propose: the most frequent ones.", low=1)
    intermediate_size: int = option(0, "Width of the feed-forward part.", low=0)
    num_heads: int = option(0, "Attention heads.", low=0)
    num_kv_heads: int = option(0, "Heads of keys and values.", low=0)
    head_dim: int = option(0, "Width of a head.", low=0)
    sliding_window: int = option(
        512, "Positions that a block attends to; 0 for all: programs other than forerun can read these alone.", low=0
    )
    markov_rank: int = option(64, "Rank of the bias by the token before; 0 for none.", low=0)
    markov_shared: bool = option(
        False,
        "Make that bias of the target's embeddings and the output rows, by two small matrices in place of a row for "
        "each token: programs other than forerun cannot read it.",
    )
    confidence: bool = option(False, "Train an estimate of the chance that a token is accepted.")
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
    own_output_rows: bool = option(False, "Train an output layer, in place of the target's rows.")

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        layer_numbers(self.layers)


@dataclass(frozen=True, slots=True)
class BlockTraining(HeadTraining):
    """`forerun train block`: a head that drafts a block in one pass."""

    shape: BlockShape = field(default_factory=BlockShape)
    start: str = option(
        "",
        "Folder of an EAGLE-3 head of the same target and sizes, whose layer a head with --context-tokens begins as.",
        metavar="FOLDER",
        default_text="random weights",
    )
    anchors: int = option(128, "Blocks that are learnt of each row, at random places.", low=1)
    gamma: float = option(4.0, "Token k weighs exp(-(k - 1) / gamma), if weights decay.", low=0, above=True)
    confidence_weight: float = option(1.0, "Weight of the loss of the confidence.", low=0)
