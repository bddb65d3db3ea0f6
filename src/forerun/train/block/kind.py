"""Block heads as a kind of head that is trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from forerun.drafters.model.block import Block
from forerun.errors import ConfigError
from forerun.heads import BlockConfig, StoredHead
from forerun.models import LanguageModel
from forerun.train.block.loss import BlockLoss, block_outputs, logit_parts
from forerun.train.block.module import BlockHead
from forerun.train.block.options import BlockTraining
from forerun.train.block.start import block_config, set_first_weights, start_of
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

    @property
    def most_draft_tokens(self) -> int:
        """As `HeadKind.most_draft_tokens`."""
        return self.options.shape.block_size

    def __init__(self, options: BlockTraining) -> None:
        super().__init__(options)
        if options.start and not options.shape.context_tokens:
            raise ConfigError("start is given, but only a head with context_tokens has the layer of an EAGLE head.")
        self._start: Mapping[str, Tensor] = {}

    def config(self, name: str, served: LanguageModel, max_positions: int) -> BlockConfig:
        """As `HeadKind.config`.

        Raises:
            ModelLoadError, IncompatibleDrafterError, ConfigError: the head to start from is none, or not such a one.
        """
        config = block_config(name, served, self.options.shape, max_positions)
        if self.options.start:
            self._start = start_of(Path(self.options.start), config, served)
        return config

    def module(self, config: BlockConfig) -> BlockHead:
        """As `HeadKind.module`."""
        return BlockHead(config)

    def set_first_weights(self, head: BlockHead, last_states: Tensor, output_rows: Tensor) -> None:
        """As `HeadKind.set_first_weights`."""
        set_first_weights(head, last_states, output_rows, self.options.seed, self._start)

    def drafter(self, head: StoredHead[BlockConfig]) -> Block:
        """As `HeadKind.drafter`."""
        return Block(head)
