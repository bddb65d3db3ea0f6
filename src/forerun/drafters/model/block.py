"""A block head drafts all tokens of a chain in one pass (DFlash: 2602.06036), each with a bias by the token before it
and a chance of its own where the head has these (DSpark: 2607.05147)."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from forerun.drafters.model.draft_model import DraftModel, GrowingChain, without
from forerun.drafters.model.head_feeding import HeadFeeding
from forerun.drafters.model.picking import Picking
from forerun.heads import BlockConfig, HeadConfig, StoredHead
from forerun.models import LanguageModel, Rows
from forerun.models.block import Block as Slots, BlockModel
from forerun.types import Sequence

_CAPPED = (
    "%(name)s was trained on blocks of %(most)d tokens: of the %(budget)d that are asked for, a draft has no more than "
    "these."
)


class Block(HeadFeeding, DraftModel):
    """Drafts chains with a head that reads the target's hidden states, all tokens in one pass. They are drawn from left
    to right, since the distribution of each may depend on the token before it.

    A draft is at most as long as the blocks that the head was trained on.

    Args:
        model: folder of the head, or a head that was read; None takes the one that comes with forerun for the target.
    """

    _example = "block"

    def __init__(self, model: str | Path | StoredHead[HeadConfig] | None = None) -> None:
        DraftModel.__init__(self)
        self._read_head(model)
        self._block: BlockModel | None = None

    def _of_head(self, head: StoredHead[HeadConfig], target: LanguageModel, name: str) -> BlockModel:
        self._block = BlockModel(head.of(BlockConfig, name, "block"), target, name)
        return self._block

    def _room(self, sequence: Sequence, budget: int) -> int:
        assert self._block is not None
        return super()._room(sequence, self._capped(budget, self._block.config.block_size, _CAPPED))

    def _grow(self, growing: list[GrowingChain], price: float) -> None:
        model = self._block
        if not growing or model is None:
            return
        late = [chain for chain in growing if chain.unfed]
        if late:
            rows = [Rows(chain.state.cache, chain.unfed, None, 0) for chain in late]
            self._feed(rows, [chain.state for chain in late], final=True)
        try:
            outputs, logits = model.draft([_slots(chain) for chain in growing])
        finally:
            for chain in growing:
                chain.state.cache.drop()
        starts = dict(zip(map(id, growing), accumulate((chain.budget for chain in growing), initial=0), strict=False))
        while growing:
            at = torch.tensor([starts[id(chain)] + len(chain.tree) for chain in growing], device=model.device)
            last = [(chain.tree.ids or chain.sequence.token_ids)[-1] for chain in growing]
            before = torch.tensor(self._within_vocabulary(last), device=model.device)
            bias = model.bias(before)
            wanted = logits[at] if bias is None else logits[at] + bias
            bad = self._non_finite_rows(wanted)
            if price > 0:
                _estimate(growing, model.acceptance(outputs[at], before))
            if bad:
                growing, wanted = without(growing, wanted, bad)
            if growing:
                self._extend(growing, wanted, price > 0)
            growing = [chain for chain in growing if not chain.ended]

    def _chances(self, chains: list[GrowingChain], values: Tensor, picked: Tensor, picking: Picking) -> list[float]:
        """As `DraftModel._chances`, or what the head itself estimates."""
        estimates = [chain.estimate for chain in chains if chain.estimate is not None]
        if estimates:
            return estimates
        return super()._chances(chains, values, picked, picking)

    def _keep(self, chain: GrowingChain, num_proposed: int) -> None:
        """Nothing was fed that could be dropped."""


def _slots(chain: GrowingChain) -> Slots:
    return Slots(chain.state.cache, chain.sequence.token_ids[-1], chain.budget)


def _estimate(chains: list[GrowingChain], chances: Tensor | None) -> None:
    """Tell each chain the chance of its next token. chances: [chains]; None: the head has no estimate."""
    if chances is not None:
        for chain, chance in zip(chains, chances.tolist(), strict=True):
            chain.estimate = chance
