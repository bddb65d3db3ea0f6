"""Block heads as a kind of head that is trained."""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

from forerun.heads import BlockConfig, StoredHead
from forerun.models import LanguageModel, Rows
from forerun.models.block import Block, BlockModel
from forerun.train.block.loss import BlockLoss, block_outputs, logit_parts
from forerun.train.block.module import BlockHead
from forerun.train.block.options import BlockTraining
from forerun.train.block.start import block_config, set_first_weights
from forerun.train.heads.costs import CONTEXT, ROUNDS, StepCosts, seconds_of, target_costs
from forerun.train.heads.kind import HeadKind
from forerun.train.heads.module import HeadModule
from forerun.train.heads.run import Read


def block_guess(head: HeadModule, read: Read) -> list[tuple[Tensor, Tensor]]:
    """As `evaluate.Guess`: of a block at every active row, as many tokens as there are steps, each after the text's
    token before it."""
    assert isinstance(head, BlockHead)
    outputs, before = block_outputs(head, read.rows, read)
    parts = logit_parts(head, read.target, outputs.flatten(0, 1), before.flatten())
    return [(features.view(*before.shape, -1).transpose(0, 1), layer) for features, layer in parts]


class BlockKind(HeadKind[BlockTraining]):
    """Block heads."""

    loss = BlockLoss
    guess = staticmethod(block_guess)

    def config(self, name: str, served: LanguageModel, max_positions: int) -> BlockConfig:
        """As `HeadKind.config`."""
        return block_config(name, served, self.options.shape, max_positions)

    def module(self, config: BlockConfig) -> BlockHead:
        """As `HeadKind.module`."""
        return BlockHead(config)

    def set_first_weights(self, head: BlockHead, last_states: Tensor, output_rows: Tensor) -> None:
        """As `HeadKind.set_first_weights`."""
        set_first_weights(head, last_states, output_rows, self.options.seed)

    def costs(self, served: LanguageModel, head: StoredHead[BlockConfig], num_draft_tokens: int) -> StepCosts:
        """As `HeadKind.costs`: a pass costs what its first token does, and something for each later one."""
        timed = _Timed(BlockModel(head, served, "the head"))
        try:
            first, whole = (timed.seconds(count) for count in (1, num_draft_tokens))
        finally:
            timed.cache.free()
        later = (whole - first) / max(1, num_draft_tokens - 1)
        return StepCosts(target_costs(served, num_draft_tokens), (first, max(0.0, later)))


class _Timed:
    """A head with a context in its cache."""

    def __init__(self, model: BlockModel) -> None:
        self._model = model
        self.cache = model.new_cache()
        self._feed(CONTEXT)
        self.cache.commit(range(CONTEXT))

    def seconds(self, count: int) -> float:
        """Median of a pass that feeds two rows of context and drafts so many tokens."""
        return statistics.median([seconds_of(self._model, lambda: self._pass(count)) for _ in range(ROUNDS + 1)][1:])

    def _pass(self, count: int) -> None:
        self._feed(2)
        before = torch.zeros(count, dtype=torch.int64, device=self._model.device)
        _, logits = self._model.draft([Block(self.cache, 0, count)])
        for place in range(count):
            bias = self._model.bias(before[place : place + 1])
            (logits[place : place + 1] if bias is None else logits[place : place + 1] + bias).argmax(-1)
        self.cache.drop()

    def _feed(self, count: int) -> None:
        states = torch.zeros(count, self._model.config.hidden_size, dtype=self._model.compute_dtype)
        self._model.forward([Rows(self.cache, [0] * count, num_logits=0, states=states.to(self._model.device))])
