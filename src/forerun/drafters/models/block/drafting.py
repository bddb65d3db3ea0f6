"""A block head as a model that drafts."""

from __future__ import annotations

from pathlib import Path

from forerun.drafters.models.block.config import BlockConfig
from forerun.drafters.models.block.model import BlockModel
from forerun.drafters.models.head_files.source import HeadSource
from forerun.drafters.models.heads.config import HeadConfig, StoredHead
from forerun.drafters.models.heads.drafting import ChainLimit, FusingHead, pair_ids
from forerun.models import LanguageModel
from forerun.types import Sequence

_LIMITED = (
    "%(name)s was trained on blocks of %(most)d tokens: of the %(max_nodes)d that are requested, a draft has no more "
    "than these."
)


class BlockHead(FusingHead):
    """A block head: its rows of committed tokens are the context of blocks, whose rows are dropped at once."""

    def __init__(self, model: str | Path | StoredHead[HeadConfig] | None) -> None:
        super().__init__(HeadSource(model, "block", _make))
        self._limit = ChainLimit(_LIMITED)

    @property
    def block(self) -> BlockModel:
        """Return the model with its type, after `bind`."""
        assert isinstance(self.model, BlockModel)
        return self.model

    def prefix_ids(self, sequence: Sequence) -> list[int]:
        if not self.block.config.context_tokens:
            return super().prefix_ids(sequence)
        return pair_ids(self.columns.readable(sequence.token_ids), self.vocab_size)

    def longest_chain(self, max_nodes: int) -> int:
        return self._limit.of(max_nodes, self.block.config.block_size, self.model.name)


def _make(head: StoredHead[HeadConfig], target: LanguageModel, name: str) -> BlockModel:
    return BlockModel(head.of(BlockConfig, name, "block"), target, name)
