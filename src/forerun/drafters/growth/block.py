"""Blocks: what a block head computes in one pass for all rows of chains (`growth/parallel.py`)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.drafters.growth.growing_chain import GrowingChain
from forerun.drafters.growth.parallel import ComputedRows
from forerun.drafters.models.base import DraftingModel
from forerun.drafters.models.block.drafting import BlockHead
from forerun.drafters.models.block.model import BlockInput, BlockModel
from forerun.drafters.models.heads.drafting import HeadState
from forerun.models import Rows


@dataclass(frozen=True, slots=True)
class BlockRows(ComputedRows):
    """The rows of blocks.

    Attributes:
        model: that computed them.
        blocks: one for each chain.
        outputs: [rows, hidden_size], what the output layer read.
    """

    model: BlockModel
    blocks: list[BlockInput]
    outputs: Tensor
    logits: Tensor

    def likely(self) -> list[list[int]]:
        return self.model.likely(self.logits, self.blocks)

    def following(self, at: slice | Tensor, before: list[int]) -> tuple[Tensor, Tensor | None]:
        tokens = torch.tensor(before, device=self.model.device)
        bias = self.model.bias(tokens)
        logits = self.logits[at] if bias is None else self.logits[at] + bias
        return logits, self.model.acceptance(self.outputs[at], tokens)


def block_rows(head: DraftingModel[Any], chains: Seq[GrowingChain]) -> BlockRows:
    """Feed a block head what it lacks of the committed tokens, and compute a block for each chain."""
    assert isinstance(head, BlockHead)
    uncomputed = [chain for chain in chains if chain.unfed]
    if uncomputed:
        context = [Rows(chain.state.cache, chain.unfed, None, 0) for chain in uncomputed]
        head.feed(context, [head.states[chain.sequence] for chain in uncomputed], final=True)
    blocks = [_block_input(chain, head.block) for chain in chains]
    try:
        outputs, logits = head.block.draft(blocks)
    finally:
        for chain in chains:
            chain.state.cache.drop()
    return BlockRows(head.block, blocks, outputs, logits)


def _block_input(chain: GrowingChain, model: BlockModel) -> BlockInput:
    state = chain.state
    assert isinstance(state, HeadState)
    before = state.before_last(model.fuse) if model.config.context_tokens else None
    return BlockInput(state.cache, chain.sequence.token_ids[-1], chain.max_nodes, before)
