"""Chains of which a model computes all rows in one pass.

Draft models that were tuned for it read a mask token in place of each token that is not known yet (PARD, 2504.18583):
after the committed tokens come K - 1 of them, at the positions that follow, and the last K rows give K tokens. Each is
drawn from a distribution of its own, which depends on committed tokens alone. Rows of mask tokens are dropped, and what
is accepted is fed as itself before the next draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from forerun.drafters.growth.chain import ChainGrowth
from forerun.drafters.growth.growing_chain import GrowingChain, Picking, end_chains
from forerun.drafters.models.base import DraftingModel
from forerun.models import Rows
from forerun.sampling import row_argmax


class ComputedRows(ABC):
    """The rows of some chains, one chain after the other, as one pass has computed them.

    Attributes:
        logits: [rows, draft vocabulary], whatever the tokens before are.
    """

    logits: Tensor

    @abstractmethod
    def likely(self) -> list[list[int]]:
        """Return the tokens of the largest logits, chain by chain, each after those before it.

        They end before a row whose logits are not all finite; empty where they cannot be computed at once.
        """

    def following(self, at: slice | Tensor, before: list[int]) -> tuple[Tensor, Tensor | None]:
        """Return the logits of these rows, and the probabilities that their tokens are accepted, if the model has
        estimates of its own.

        before: the token before each of them.
        """
        return self.logits[at], None


class ParallelGrowth(ChainGrowth):
    """Grows chains of which the model computes all rows in one pass. They are drawn from left to right, since the
    distribution of each token may depend on the token before it.

    Args:
        compute: computes the rows of chains, as many as each may have tokens, and leaves no scratch but of committed
            tokens.
    """

    continues = False  # its rows are computed for the tokens after the last committed one

    def __init__(
        self, model: DraftingModel[Any], compute: Callable[[DraftingModel[Any], Seq[GrowingChain]], ComputedRows]
    ) -> None:
        super().__init__(model)
        self._compute = compute

    def _grow(self, growing: list[GrowingChain], min_acceptance_prob: float) -> None:
        if not growing:
            return
        computed = self._compute(self._model, growing)
        starts = dict(
            zip(map(id, growing), accumulate((chain.max_nodes for chain in growing), initial=0), strict=False)
        )
        if any(chain.picking is Picking.GREEDY for chain in growing):
            growing = self._likely(growing, computed.likely(), min_acceptance_prob > 0)
        while growing:
            rows, before = self._next_rows(growing, starts)
            is_all = rows == list(range(len(computed.logits)))
            at = slice(None) if is_all else torch.tensor(rows, device=computed.logits.device)
            wanted, accept_probs = computed.following(at, before)
            bad = self._model.non_finite_rows(wanted)
            if min_acceptance_prob > 0:
                _estimate(growing, accept_probs)
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

    def _next_rows(self, growing: list[GrowingChain], starts: dict[int, int]) -> tuple[list[int], list[int]]:
        """Return the rows of the next tokens among those computed, and the token before each, as the model reads it.

        starts: the first row of each chain, by its identity.
        """
        rows: list[int] = []
        before: list[int] = []
        for chain in growing:
            first = starts[id(chain)] + len(chain.tree)
            rows += range(first, first + chain.num_rows)
            before += [(chain.tree.ids or chain.sequence.token_ids)[-1], *chain.proposed]
        return rows, self._model.columns.readable(before)

    def _accept_probs(
        self, chains: list[GrowingChain], values: Tensor, picked: Tensor, picking: Picking
    ) -> list[float]:
        """Return the model's own estimates of acceptance, or those of `ChainGrowth` where it has none."""
        estimates = [estimate for chain in chains for estimate in chain.estimates]
        return estimates or super()._accept_probs(chains, values, picked, picking)

    def _keep(self, chain: GrowingChain, num_proposed: int) -> None:
        """Clear the proposed tokens; no rows were fed for them."""
        chain.proposed = []


@dataclass(frozen=True, slots=True)
class MaskedRows(ComputedRows):
    """The rows of a draft model that reads mask tokens.

    Attributes:
        model: that computed them.
        counts: rows of each chain.
    """

    model: DraftingModel[Any]
    logits: Tensor
    counts: list[int]

    def likely(self) -> list[list[int]]:
        columns = self.model.columns
        values = self.logits[:, : columns.num_columns]
        found = row_argmax(values)
        tokens = columns.names(found.tolist())
        has_numbers = values.gather(-1, found[:, None])[:, 0].isfinite().tolist()
        ends = accumulate(self.counts)
        parts = [range(end - count, end) for end, count in zip(ends, self.counts, strict=True)]
        finite = [next((row for row in part if not has_numbers[row]), part.stop) for part in parts]
        return [tokens[part.start : end] for part, end in zip(parts, finite, strict=True)]


def masked_rows(model: DraftingModel[Any], chains: Seq[GrowingChain]) -> MaskedRows:
    """Feed each chain's committed tokens and the mask tokens behind them, and drop the rows of these."""
    mask = model.model.mask_token
    assert mask is not None
    counts = [chain.max_nodes for chain in chains]
    rows = [
        Rows(chain.state.cache, [*chain.unfed, *[mask] * (count - 1)], None, count)
        for chain, count in zip(chains, counts, strict=True)
    ]
    result = model.feed(rows, [chain.state for chain in chains])
    for chain in chains:
        chain.state.drop(len(chain.unfed))
    return MaskedRows(model, result.logits, counts)


def _estimate(chains: list[GrowingChain], accept_probs: Tensor | None) -> None:
    """Set the estimates of each chain's next tokens. accept_probs: [rows]; None: the model has no estimate."""
    if accept_probs is not None:
        values = accept_probs.tolist()
        start = 0
        for chain in chains:
            chain.estimates = values[start : start + chain.num_rows]
            start += chain.num_rows
