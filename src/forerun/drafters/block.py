"""A block head drafts all tokens of a chain in one pass (DFlash: 2602.06036), each with a bias by the token before it
and an estimated acceptance probability where the head has these (DSpark: 2607.05147)."""

from __future__ import annotations

from pathlib import Path

from forerun.drafters.growth.block import block_rows
from forerun.drafters.growth.parallel import ParallelGrowth
from forerun.drafters.model_drafter import ModelDrafter
from forerun.drafters.models.block.drafting import BlockHead
from forerun.drafters.models.heads.config import HeadConfig, StoredHead


class Block(ModelDrafter):
    """Drafts chains with a head that reads the target's hidden states, all tokens in one pass. They are drawn from left
    to right, since the distribution of each may depend on the token before it.

    A draft is at most as long as the blocks that the head was trained on.

    Args:
        model: folder of the head, or a head that was read; None takes the one that comes with forerun for the target.
    """

    def __init__(self, model: str | Path | StoredHead[HeadConfig] | None = None) -> None:
        head = BlockHead(model)
        super().__init__("Block", head, ParallelGrowth(head, block_rows))
