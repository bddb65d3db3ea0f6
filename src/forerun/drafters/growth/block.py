"""Blocks: chains of which a block head computes all rows in one pass."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from forerun.drafters.growth.chain import ChainGrowth
from forerun.drafters.growth.growing_chain import GrowingChain, Picking, end_chains
from forerun.drafters.models.block.drafting import BlockHead
from forerun.drafters.models.block.model import BlockInput, BlockModel
from forerun.drafters.models.heads.drafting import HeadState
from forerun.models import Rows


class BlockGrowth(ChainGrowth):
    """Grows chains of which the model computes all rows in one pass. They are drawn from left to right, since the
    distribution of each token may depend on the token before it."""

    _model: BlockHead

    def _grow(self, growing: list[GrowingChain], min_acceptance_prob: float) -> None:
        model = self._model.block
        if not growing:
            return
        uncomputed = [chain for chain in growing if chain.unfed]
        if uncomputed:
            context = [Rows(chain.state.cache, chain.unfed, None, 0) for chain in uncomputed]
            self._model.feed(context, [self._model.states[chain.sequence] for chain in uncomputed], final=True)
        blocks = [_block_input(chain, model) for chain in growing]
        try:
            outputs, logits = model.draft(blocks)
        finally:
            for chain in growing:
                chain.state.cache.drop()
        starts = dict(
            zip(map(id, growing), accumulate((chain.max_nodes for chain in growing), initial=0), strict=False)
        )
        if any(chain.picking is Picking.GREEDY for chain in growing):
            growing = self._likely(growing, model.likely(logits, blocks), min_acceptance_prob > 0)
        while growing:
            rows, before = self._next_rows(growing, starts)
            at = slice(None) if rows == list(range(len(logits))) else torch.tensor(rows, device=model.device)
            bias = model.bias(before)
            wanted = logits[at] if bias is None else logits[at] + bias
            bad = self._model.non_finite_rows(wanted)
            if min_acceptance_prob > 0:
                _estimate(growing, model.acceptance(outputs[at], before))
            if bad:
                growing, wanted = end_chains(growing, wanted, bad)
            if growing:
                self._extend(growing, wanted, min_acceptance_prob > 0)
            growing = [chain for chain in growing if not chain.ended]

    def _likely(
        self, chains: list[GrowingChain], likely: list[list[int]], with_probabilities: bool
    ) -> list[GrowingChain]:
        """Extend greedy chains by the tokens of the largest logits, or, where options or a minimum probability may
        decide otherwise, have them proposed, so that all are looked at together. likely: of each chain, up to a row
        that is no number.

        Returns:
            The chains that have not ended.
        """
        for chain, tokens in zip(chains, likely, strict=True):
            if chain.picking is Picking.GREEDY and tokens:
                chain.proposed = tokens[:-1]
                if not with_probabilities and self._model.takes_largest(chain.sequence):
                    self._keep(chain, chain.extend(tokens, None, None))
        return [chain for chain in chains if not chain.ended]

    def _next_rows(self, growing: list[GrowingChain], starts: dict[int, int]) -> tuple[list[int], Tensor]:
        """Return the rows of the next tokens among those of `BlockModel.draft`, and [rows] the token before each.

        starts: the first row of each chain, by its identity.
        """
        rows: list[int] = []
        before: list[int] = []
        for chain in growing:
            first = starts[id(chain)] + len(chain.tree)
            rows += range(first, first + chain.num_rows)
            before += [(chain.tree.ids or chain.sequence.token_ids)[-1], *chain.proposed]
        return rows, torch.tensor(self._model.columns.readable(before), device=self._model.model.device)

    def _accept_probs(
        self, chains: list[GrowingChain], values: Tensor, picked: Tensor, picking: Picking
    ) -> list[float]:
        """Return the head's own estimates of acceptance, or those of `ChainGrowth` where it has none."""
        estimates = [estimate for chain in chains for estimate in chain.estimates]
        return estimates or super()._accept_probs(chains, values, picked, picking)

    def _keep(self, chain: GrowingChain, num_proposed: int) -> None:
        """Clear the proposed tokens; no rows were fed for them."""
        chain.proposed = []


def _block_input(chain: GrowingChain, model: BlockModel) -> BlockInput:
    state = chain.state
    assert isinstance(state, HeadState)
    before = state.before_last(model.fuse) if model.config.context_tokens else None
    return BlockInput(state.cache, chain.sequence.token_ids[-1], chain.max_nodes, before)


def _estimate(chains: list[GrowingChain], accept_probs: Tensor | None) -> None:
    """Set the estimates of each chain's next tokens. accept_probs: [rows]; None: the head has no estimate."""
    if accept_probs is not None:
        values = accept_probs.tolist()
        start = 0
        for chain in chains:
            chain.estimates = values[start : start + chain.num_rows]
            start += chain.num_rows
