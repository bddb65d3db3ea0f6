"""The model of a block head: it keeps its context in pages, and computes all tokens of a block in one pass.

`BlockConfig` describes the computation. Linear layers are of the target's kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from forerun.drafters.models.block.config import BlockConfig
from forerun.drafters.models.block.layers import (
    BlockEnds,
    BlockLayers,
    NativeBlockLayers,
    PairLayers,
    ReferenceBlockLayers,
    greedy_chains,
)
from forerun.drafters.models.heads.config import StoredHead
from forerun.drafters.models.heads.layers import HeadLayers, HeadModel
from forerun.kernels.cpu.linear import NativeLinear
from forerun.models.base import Forward, LanguageModel, Rows
from forerun.sampling import row_argmax
from forerun.types import Cache


@dataclass(frozen=True, slots=True)
class BlockInput:
    """A block to be drafted.

    Attributes:
        cache: of its sequence; the context rows below the last committed token are there.
        token_id: the last committed token.
        num_tokens: to be drafted, at least one.
        state: [hidden_size] what `BlockModel.fuse` makes of the target's states of the token before the last committed
            one, which heads with `context_tokens` read.
    """

    cache: Cache
    token_id: int
    num_tokens: int
    state: Tensor | None = None


class BlockModel(HeadModel):
    """A block head over its target.

    Context row i holds what `fuse` makes of the target's states of token i, beside token i + 1 where the head reads
    tokens. `forward` computes such rows, which have no logits; `draft` computes blocks.

    Args:
        head: its tensors, in any number format, or quantized.
        target: whose embeddings, and perhaps output layer, it reads.
        name: for messages and stored costs.

    Raises:
        IncompatibleDrafterError: the target is of another size.
    """

    def __init__(self, head: StoredHead[BlockConfig], target: LanguageModel, name: str = "a head") -> None:
        config = head.config
        super().__init__(head, target, name)
        self.config = config
        self._made = made = HeadLayers.of(head, target)
        self._ends = BlockEnds.of(made, config, target, self.token_ids)
        self.compute_dtype = made.compute
        output = made.output(config.own_output_rows, target, self.token_ids)
        self._layers: BlockLayers
        if config.context_tokens:
            self._layers = PairLayers(made, config, output, target)
        elif made.library is None:
            self._layers = ReferenceBlockLayers(made, config, output)
        else:
            self._layers = NativeBlockLayers(made, config, output, made.library)
        self.planner = self._layers.planner

    @torch.inference_mode()
    def fuse(self, hidden_outputs: Tensor) -> Tensor:
        """Fuse the target's states, [n, layers, hidden_size], to [n, hidden_size] in `compute_dtype`."""
        return self._layers.fuse(hidden_outputs.to(self.device, self.compute_dtype))

    @torch.inference_mode()
    def forward(self, batch: Sequence[Rows], layers: Sequence[int] = ()) -> Forward:
        """Compute context rows, of which heads with `context_tokens` read the tokens. They join their caches' scratch.

        Raises:
            ValueError: rows have no states, or layers or logits are requested.
        """
        if layers or any(rows.states is None or rows.num_wanted for rows in batch):
            raise ValueError("context rows of a block head are states, and have no logits")
        if any(rows.states is not None and len(rows.states) != len(rows.token_ids) for rows in batch):
            raise ValueError("context rows of a block head need a state for each token")
        self._layers.context(batch)
        return Forward(torch.empty(0, self.vocab_size, dtype=self.compute_dtype, device=self.device))

    @torch.inference_mode()
    def draft(self, blocks: Sequence[BlockInput]) -> tuple[Tensor, Tensor]:
        """Compute blocks of several sequences. Their rows join the caches' scratch, to be dropped.

        Returns:
            For the tokens to be drafted, block by block: [T, hidden_size] what the output layer reads, and
            [T, draft_vocab_size] logits without the Markov bias.

        Raises:
            ValueError: the head reads the state of the token before, and a block has none.
        """
        if isinstance(self._layers, PairLayers):
            return self._draft_pairs(self._layers, blocks)
        first = self.config.first_slot
        batch = [
            Rows(
                block.cache,
                [block.token_id] + [0] * (first + block.num_tokens - 1),
                num_logits=block.num_tokens,
                is_block=True,
            )
            for block in blocks
        ]
        *anchors, end = accumulate((len(rows.token_ids) for rows in batch), initial=0)
        tokens = torch.tensor([block.token_id for block in blocks], device=self.device)
        assert self._ends.mask is not None
        x = self._ends.mask.expand(end, -1).clone()
        x[anchors] = self.target.embedding_rows(tokens).to(self.compute_dtype)
        return self._layers.forward(batch, x)

    def _draft_pairs(self, layers: PairLayers, blocks: Sequence[BlockInput]) -> tuple[Tensor, Tensor]:
        """Compute blocks of a head with `context_tokens`. Arguments, results and errors as of `draft`."""
        states = [block.state for block in blocks if block.state is not None]
        if len(states) != len(blocks):
            raise ValueError("slots of a head with context_tokens read the state of the token before the last one")
        batch = [Rows(block.cache, [block.token_id] * block.num_tokens, is_block=True) for block in blocks]
        return layers.forward(batch, states)

    @torch.inference_mode()
    def likely(self, logits: Tensor, blocks: Sequence[BlockInput]) -> list[list[int]]:
        """Return the tokens of the largest logits, each with the bias of the token before it, block by block.

        They end before a row whose logits are not all finite; empty where they cannot be computed at once.

        Args:
            logits: of `draft`, of these blocks.
        """
        counts = [block.num_tokens for block in blocks]
        ends = self._ends
        if ends.before is None:
            columns = row_argmax(logits)
            has_numbers = logits.gather(-1, columns[:, None])[:, 0].isfinite()
            tokens = torch.where(has_numbers, self.token_ids[columns], -1).tolist()
        elif self._made.library is not None and isinstance(ends.after, NativeLinear):
            last = [block.token_id for block in blocks]
            tokens = greedy_chains(self._made.library, ends.after, ends.before, self.token_ids, logits, last, counts)
        else:
            return [[] for _ in blocks]
        starts = accumulate(counts, initial=0)
        return [_finite(tokens[start : start + count]) for start, count in zip(starts, counts, strict=False)]

    @torch.inference_mode()
    def bias(self, before: Tensor) -> Tensor | None:
        """Return [n, draft_vocab_size] what the tokens before add to the logits; None without a Markov bias.

        before: [n] int64.
        """
        ends = self._ends
        if ends.before is None or ends.after is None:
            return None
        return self._made.multiply(ends.after, ends.before[before])

    @torch.inference_mode()
    def acceptance(self, outputs: Tensor, before: Tensor) -> Tensor | None:
        """Return [n] the estimated probability that each slot's token is accepted; None if the head has no estimate.

        Args:
            outputs: [n, hidden_size], of `draft`.
            before: [n] int64, the token before each.
        """
        ends = self._ends
        if ends.confidence is None:
            return None
        weight, bias = ends.confidence
        if ends.before is not None and self.config.confidence_with_markov:
            outputs = torch.cat([outputs, ends.before[before]], 1)
        return torch.sigmoid(outputs @ weight + bias)


def _finite(tokens: list[int]) -> list[int]:
    """Return the tokens before the first -1."""
    return tokens[: tokens.index(-1)] if -1 in tokens else tokens
